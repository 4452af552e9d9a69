"""Codebooks: the sixteen exponents that have a short code, for one plane and for a model.

SplitZip (arXiv 2605.01708) calibrates one top-16 codebook offline. Here each layer's K and V have
their own, and every codebook has an id that is the hash of its content, which payloads carry.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codec.errors import CodebookMissing, InvalidCodebook, UnsupportedDtype
from codec.format import (
    CHUNK,
    CODE_BYTES,
    ESCAPE_BYTES,
    SLOT_SIZES,
    SPILL_UNIT,
    WORD,
    largest_list,
    slot_capacity,
    slot_high_words,
)

CODES = 16
_EXPONENT_VALUES = 256
_DTYPE_NAMES = {torch.bfloat16: "bf16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_ARTIFACT = "headrace-codebooks"
_ARTIFACT_VERSION = 2


def _content_hash(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Codebook:
    """Sixteen biased exponents of one element type; code `i` means `exponents[i]`.

    Attributes:
        exponents: they ascend, so that equal sets are equal codebooks.
        dtype: the element type.
        slot_bytes: what each chunk has for its escapes in place: 8, 16 or 32. The codebooks of one
            segment have one size.

    Raises `UnsupportedDtype` and `InvalidCodebook`.
    """

    exponents: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    slot_bytes: int = SLOT_SIZES[0]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_NAMES:
            raise UnsupportedDtype(f"no codebooks for {self.dtype}")
        if len(self.exponents) != CODES or list(self.exponents) != sorted(set(self.exponents)):
            raise InvalidCodebook(f"{CODES} ascending exponents are needed: {self.exponents}")
        if not set(self.exponents) <= set(range(_EXPONENT_VALUES)):
            raise InvalidCodebook(f"exponents lie in [0, {_EXPONENT_VALUES}): {self.exponents}")
        if self.slot_bytes not in SLOT_SIZES:
            raise InvalidCodebook(f"slots of {self.slot_bytes} bytes, one of {SLOT_SIZES}")

    @cached_property
    def id(self) -> str:
        """64-bit content hash, sixteen hex digits."""
        content = (bytes(self.exponents), bytes([self.slot_bytes]))
        return _content_hash(_DTYPE_NAMES[self.dtype].encode(), *content)

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


def calibrate(
    sample: Tensor | Sequence[Tensor],
    dtype: torch.dtype = torch.bfloat16,
    slot_bytes: int | None = None,
) -> Codebook:
    """The codebook of the sixteen most frequent exponents of a sample.

    Args:
        sample: values of any shape, or several such tensors, on any device. Tensors of another
            floating dtype are rounded to `dtype` first.
        dtype: the element type that will be encoded.
        slot_bytes: 8, 16 or 32; `None` takes the size that the sample, flattened and cut into
            chunks, takes the fewest bytes with.

    Of equally frequent exponents the smaller one is taken. If fewer than sixteen occur, the codes
    that are left go to 0, which zeros have, and then to the exponents nearest to the most frequent
    one, where unseen values are likeliest. Two samples with the same sixteen and the same slot size
    give the same id. No sync for each value.

    Raises `InvalidCodebook` for an empty sample, `UnsupportedDtype` for a dtype without codebooks.
    """
    if dtype not in _DTYPE_NAMES:
        raise UnsupportedDtype(f"no codebooks for {dtype}")
    tensors = [sample] if isinstance(sample, Tensor) else list(sample)
    codebook = Codebook(_most_frequent(tensors, dtype), dtype)
    if slot_bytes is None:
        slot_bytes = _cheapest([_slot_costs(tensors, codebook)])
    return replace(codebook, slot_bytes=slot_bytes)


def _exponents_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The biased exponents of a tensor's elements, int32 `[elements]`."""
    if not tensor.is_floating_point():
        raise UnsupportedDtype(f"a sample of {tensor.dtype} has no exponents")
    bits = tensor.detach().to(dtype).reshape(-1).view(torch.int16).to(torch.int32)
    return bits.bitwise_right_shift(7).bitwise_and(0xFF)


def _most_frequent(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[int, ...]:
    counts = torch.zeros(_EXPONENT_VALUES, dtype=torch.int64)
    for tensor in tensors:
        exponents = _exponents_of(tensor, dtype)
        counts += torch.bincount(exponents, minlength=_EXPONENT_VALUES).cpu()
    frequency = counts.tolist()
    if not any(frequency):
        raise InvalidCodebook("an empty sample calibrates nothing")
    seen = [exponent for exponent in range(_EXPONENT_VALUES) if frequency[exponent]]
    seen.sort(key=lambda exponent: (-frequency[exponent], exponent))
    unseen = [exponent for exponent in range(_EXPONENT_VALUES) if not frequency[exponent]]
    unseen.sort(key=lambda exponent: (exponent != 0, abs(exponent - seen[0]), exponent))
    return tuple(sorted((seen + unseen)[:CODES]))


def _slot_costs(tensors: Sequence[Tensor], codebook: Codebook) -> list[int]:
    """Bytes of the slots and the spilled ranges of a sample, for each of `SLOT_SIZES`."""
    costs = [0] * len(SLOT_SIZES)
    for tensor in tensors:
        has_code = torch.zeros(_EXPONENT_VALUES, dtype=torch.bool, device=tensor.device)
        has_code[list(codebook.exponents)] = True
        escaped = ~has_code[_exponents_of(tensor, codebook.dtype)]
        cut = len(escaped) // CHUNK * CHUNK
        for chunks, length in ((escaped[:cut], CHUNK), (escaped[cut:], len(escaped) - cut)):
            counts = chunks.view(-1, max(length, 1)).sum(dim=1)
            for number, slot_bytes in enumerate(SLOT_SIZES):
                costs[number] += _bytes_with(slot_bytes, counts, -(-length // WORD))
    return costs


def _bytes_with(slot_bytes: int, counts: Tensor, words: int) -> int:
    """What chunks of so many escapes and words take in slots of this size and in the spill area."""
    full = CODE_BYTES * max(0, words - slot_high_words(slot_bytes))
    spilled = torch.where(counts <= largest_list(words), ESCAPE_BYTES * counts, full)
    spilled = spilled.masked_fill(counts <= slot_capacity(slot_bytes), 0)
    units = (spilled + SPILL_UNIT - 1) // SPILL_UNIT
    return slot_bytes * len(counts) + SPILL_UNIT * int(units.sum())


def _cheapest(costs: Sequence[Sequence[int]]) -> int:
    """The slot size of the smallest sum of several `_slot_costs`; of equal ones the smaller."""
    return min(zip(map(sum, zip(*costs, strict=True)), SLOT_SIZES, strict=True))[1]


@dataclass(frozen=True)
class Codebooks:
    """The codebooks of a model, one for each (layer, plane): `codebooks[3, "k"]`.

    `entries` is sorted by layer and plane, so equal content has equal ids; all have one slot size,
    since any of them may meet in a segment. Raises `InvalidCodebook` if it is empty, unsorted, has
    a key twice or two slot sizes.
    """

    entries: tuple[tuple[int, str, Codebook], ...]

    def __post_init__(self) -> None:
        keys = [(layer, plane) for layer, plane, _ in self.entries]
        if not keys or keys != sorted(set(keys)):
            raise InvalidCodebook("codebooks are sorted by (layer, plane), at least one, each once")
        sizes = {codebook.slot_bytes for _, _, codebook in self.entries}
        if len(sizes) > 1:
            raise InvalidCodebook(f"a model's codebooks have one slot size, not {sorted(sizes)}")

    @classmethod
    def of(cls, codebooks: Mapping[tuple[int, str], Codebook]) -> "Codebooks":
        """From a mapping (layer, plane) → codebook, in any order."""
        return cls(tuple((*key, codebooks[key]) for key in sorted(codebooks)))

    @classmethod
    def calibrate(
        cls, planes_samples: Mapping[tuple[int, str], Tensor | Sequence[Tensor]]
    ) -> "Codebooks":
        """Calibrate each (layer, plane) from its own sample, with one slot size for all of them.

        See `codec.calibrate`.
        """
        codebooks, costs = {}, []
        for key, sample in planes_samples.items():
            tensors = [sample] if isinstance(sample, Tensor) else list(sample)
            codebooks[key] = calibrate(tensors, slot_bytes=SLOT_SIZES[0])
            costs.append(_slot_costs(tensors, codebooks[key]))
        size = _cheapest(costs) if costs else SLOT_SIZES[0]
        return cls.of({key: replace(book, slot_bytes=size) for key, book in codebooks.items()})

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
                    "slot_bytes": codebook.slot_bytes,
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
    codebook = Codebook(exponents, _DTYPES[item["dtype"]], int(item["slot_bytes"]))
    return int(item["layer"]), str(item["plane"]), codebook
