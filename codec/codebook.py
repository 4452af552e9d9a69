"""Codebooks: the sixteen exponents that have a short code, for one plane and for a model.

SplitZip (arXiv 2605.01708) calibrates one top-16 codebook offline. Here each layer's K and V have
their own, and every codebook has an id that is the hash of its content, which payloads carry.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codec.errors import CodebookMissing, InvalidCodebook, UnsupportedDtype

CODES = 16
_EXPONENT_VALUES = 256
_DTYPE_NAMES = {torch.bfloat16: "bf16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_ARTIFACT = "headrace-codebooks"
_ARTIFACT_VERSION = 1


def _content_hash(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Codebook:
    """Sixteen distinct biased exponents of one element type; code `i` means `exponents[i]`.

    Raises `UnsupportedDtype` and `InvalidCodebook`.
    """

    exponents: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_NAMES:
            raise UnsupportedDtype(f"no codebooks for {self.dtype}")
        distinct = set(self.exponents)
        if len(self.exponents) != CODES or len(distinct) != CODES:
            raise InvalidCodebook(f"{CODES} distinct exponents are needed: {self.exponents}")
        if not distinct <= set(range(_EXPONENT_VALUES)):
            raise InvalidCodebook(f"exponents lie in [0, {_EXPONENT_VALUES}): {self.exponents}")

    @cached_property
    def id(self) -> str:
        """64-bit content hash, sixteen hex digits."""
        return _content_hash(_DTYPE_NAMES[self.dtype].encode(), bytes(self.exponents))

    @property
    def number(self) -> int:
        """The id as the integer that headers carry."""
        return int(self.id, 16)

    @cached_property
    def code_table(self) -> bytes:
        """256 bytes: the code of each exponent, `CODES` for one that has none."""
        table = bytearray([CODES] * _EXPONENT_VALUES)
        for code, exponent in enumerate(self.exponents):
            table[exponent] = code
        return bytes(table)


def calibrate(sample: Tensor | Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> Codebook:
    """The codebook of the sixteen most frequent exponents of a sample.

    Args:
        sample: values of any shape, or several such tensors, on any device. Tensors of another
            floating dtype are rounded to `dtype` first.
        dtype: the element type that will be encoded.

    Of equally frequent exponents the smaller one is taken. If fewer than sixteen occur, the codes
    that are left go to 0, which zeros have, and then to the exponents nearest to the most frequent
    one, where unseen values are likeliest. Codes ascend with their exponents, so two samples with
    the same sixteen give the same id. One histogram for each tensor, no sync for each value.

    Raises `InvalidCodebook` for an empty sample, `UnsupportedDtype` for a dtype without codebooks.
    """
    if dtype not in _DTYPE_NAMES:
        raise UnsupportedDtype(f"no codebooks for {dtype}")
    tensors = [sample] if isinstance(sample, Tensor) else list(sample)
    counts = torch.zeros(_EXPONENT_VALUES, dtype=torch.int64)
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise UnsupportedDtype(f"a sample of {tensor.dtype} has no exponents")
        bits = tensor.detach().to(dtype).reshape(-1).view(torch.int16).to(torch.int32)
        exponents = bits.bitwise_right_shift(7).bitwise_and(0xFF)
        counts += torch.bincount(exponents, minlength=_EXPONENT_VALUES).cpu()
    frequency = counts.tolist()
    if not any(frequency):
        raise InvalidCodebook("an empty sample calibrates nothing")
    seen = [exponent for exponent in range(_EXPONENT_VALUES) if frequency[exponent]]
    seen.sort(key=lambda exponent: (-frequency[exponent], exponent))
    unseen = [exponent for exponent in range(_EXPONENT_VALUES) if not frequency[exponent]]
    unseen.sort(key=lambda exponent: (exponent != 0, abs(exponent - seen[0]), exponent))
    return Codebook(tuple(sorted((seen + unseen)[:CODES])), dtype)


@dataclass(frozen=True)
class Codebooks:
    """The codebooks of a model, one for each (layer, plane): `codebooks[3, "k"]`.

    `entries` is sorted by layer and plane, so equal content has equal ids. Raises
    `InvalidCodebook` if it is empty, unsorted or has a key twice.
    """

    entries: tuple[tuple[int, str, Codebook], ...]

    def __post_init__(self) -> None:
        keys = [(layer, plane) for layer, plane, _ in self.entries]
        if not keys or keys != sorted(set(keys)):
            raise InvalidCodebook("codebooks are sorted by (layer, plane), at least one, each once")

    @classmethod
    def of(cls, codebooks: Mapping[tuple[int, str], Codebook]) -> "Codebooks":
        """From a mapping (layer, plane) → codebook, in any order."""
        return cls(tuple((*key, codebooks[key]) for key in sorted(codebooks)))

    @classmethod
    def calibrate(
        cls, planes_samples: Mapping[tuple[int, str], Tensor | Sequence[Tensor]]
    ) -> "Codebooks":
        """Calibrate each (layer, plane) from its own sample; see `codec.calibrate`."""
        return cls.of({key: calibrate(sample) for key, sample in planes_samples.items()})

    @cached_property
    def id(self) -> str:
        """64-bit hash of all codebooks and their keys, sixteen hex digits."""
        return _content_hash(*(f"{layer}/{plane}/{c.id}".encode() for layer, plane, c in self))

    @cached_property
    def _by_key(self) -> dict[tuple[int, str], Codebook]:
        return {(layer, plane): codebook for layer, plane, codebook in self.entries}

    def __getitem__(self, key: tuple[int, str]) -> Codebook:
        """The codebook of `(layer, plane)`. Raises `CodebookMissing`."""
        try:
            return self._by_key[key]
        except KeyError:
            raise CodebookMissing(f"no codebook for layer {key[0]}, plane {key[1]!r}") from None

    def __iter__(self) -> Iterator[tuple[int, str, Codebook]]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def save(self, path: str | Path) -> None:
        """Write the artifact as JSON."""
        artifact = {
            "format": _ARTIFACT,
            "version": _ARTIFACT_VERSION,
            "id": self.id,
            "codebooks": [
                {
                    "layer": layer,
                    "plane": plane,
                    "dtype": _DTYPE_NAMES[codebook.dtype],
                    "exponents": list(codebook.exponents),
                }
                for layer, plane, codebook in self
            ],
        }
        Path(path).write_text(json.dumps(artifact, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Codebooks":
        """Read an artifact and verify its id. Raises `InvalidCodebook`, or `OSError`."""
        try:
            artifact = json.loads(Path(path).read_text(encoding="utf-8"))
            if (artifact["format"], artifact["version"]) != (_ARTIFACT, _ARTIFACT_VERSION):
                raise InvalidCodebook(f"{path} is no {_ARTIFACT} version {_ARTIFACT_VERSION}")
            loaded = cls(tuple(_entry(item) for item in artifact["codebooks"]))
            announced = artifact["id"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidCodebook(f"{path} is no codebook artifact: {error!r}") from error
        if loaded.id != announced:
            raise InvalidCodebook(f"{path} announces id {announced}, its content is {loaded.id}")
        return loaded


def _entry(item: dict[str, Any]) -> tuple[int, str, Codebook]:
    exponents = tuple(int(exponent) for exponent in item["exponents"])
    return int(item["layer"]), str(item["plane"]), Codebook(exponents, _DTYPES[item["dtype"]])
