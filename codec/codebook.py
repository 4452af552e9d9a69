"""Codebooks: the exponents that have a code, for one plane and for a model.

SplitZip (arXiv 2605.01708, offline calibration) uses sixteen codes for a whole model. Here each
plane of each layer has its own codebook and mode. The id of a codebook is the hash of its content,
and segment headers contain it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from codec.elements import BY_NAME, ElementType, element_of
from codec.errors import CodebookMissing, InvalidCodebook
from codec.format import Mode

SECOND_CODES = 15
"""Maximum number of second-level codes. They have four bits and the values 0 to 14; the value 15
marks an exponent without a second-level code.
"""
_EXPONENT_VALUES = 256
_ARTIFACT = "headrace-codebooks"
_ARTIFACT_VERSION = 3


def _content_hash(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Codebook:
    """Exponents of one plane that have a code; code `i` means `exponents[i]`.

    Attributes:
        exponents: biased exponents, ascending, one for each code of the mode.
        mode: any mode but `Mode.RAW`.
        second: up to fifteen other exponents, ascending, for modes with an escape code. An escape
            takes four more bits, and one more word if its exponent is not among these.
        dtype: dtype of the elements.
        escape_rate: fraction of the sample's elements without a code. It describes the sample and
            is not part of the id.

    Raises:
        UnsupportedDtype: the codec does not store this dtype.
        InvalidCodebook: the exponents do not fit the mode, or the dtype does not support it.
    """

    exponents: tuple[int, ...]
    mode: Mode = Mode.TOP16
    second: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    escape_rate: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        element = element_of(self.dtype)
        if self.mode is Mode.RAW or not self.mode.supports(element):
            raise InvalidCodebook(f"{element.name} has no codebooks of mode {self.mode.name}")
        if len(self.exponents) != self.mode.codes:
            raise InvalidCodebook(
                f"{self.mode.name} needs {self.mode.codes} exponents, got {self.exponents}"
            )
        if len(self.second) > SECOND_CODES * self.mode.has_escape_code:
            raise InvalidCodebook(f"too many second-level exponents: {self.second}")
        for numbers in (self.exponents, self.second):
            if list(numbers) != sorted(set(numbers) & set(range(element.exponents))):
                raise InvalidCodebook(
                    f"exponents must ascend in [0, {element.exponents}): {numbers}"
                )
        if not 0 <= self.escape_rate <= 1:
            raise InvalidCodebook(f"the escape rate must be in [0, 1]: {self.escape_rate}")
        if set(self.exponents) & set(self.second):
            raise InvalidCodebook(
                f"first- and second-level exponents overlap: {self.exponents}, {self.second}"
            )

    @property
    def element(self) -> ElementType:
        """Element type of the dtype."""
        return element_of(self.dtype)

    @cached_property
    def id(self) -> str:
        """64-bit content hash, sixteen hexadecimal digits."""
        names = self.element.name.encode(), self.mode.name.encode()
        return _content_hash(*names, bytes(self.exponents), bytes(self.second))

    @property
    def number(self) -> int:
        """The id as an integer, as in segment headers."""
        return int(self.id, 16)

    @property
    def is_window(self) -> bool:
        """Whether the exponents are consecutive, so that code = exponent - lowest exponent."""
        return self.exponents[-1] - self.exponents[0] == len(self.exponents) - 1

    @cached_property
    def code_table(self) -> bytes:
        """Code of each exponent, 256 bytes.

        The entry of an exponent without a code is 16 plus the low four bits of its distance from
        the lowest exponent. `Mode.TOP16` stores these four bits in place of a code.
        """
        lowest = self.exponents[0]
        table = bytearray(16 | exponent - lowest & 15 for exponent in range(_EXPONENT_VALUES))
        for code, exponent in enumerate(self.exponents):
            table[exponent] = code
        return bytes(table)

    @cached_property
    def second_table(self) -> bytes:
        """Second-level code of each exponent, 256 bytes; 15 for exponents without one."""
        table = bytearray([SECOND_CODES] * _EXPONENT_VALUES)
        for code, exponent in enumerate(self.second):
            table[exponent] = code
        return bytes(table)


@dataclass(frozen=True)
class Codebooks:
    """Codebooks of a model, one for each (layer, plane): `codebooks[3, "k"]`.

    `entries` is sorted by layer and plane, so equal content has equal ids. All codebooks have the
    same dtype, because any of them may be used in one segment.

    Raises:
        InvalidCodebook: there are no entries, or they are unsorted, repeated or of different
            dtypes.
    """

    entries: tuple[tuple[int, str, Codebook], ...]

    def __post_init__(self) -> None:
        keys = [(layer, plane) for layer, plane, _ in self.entries]
        if not keys or keys != sorted(set(keys)):
            raise InvalidCodebook(
                "codebooks must be sorted by (layer, plane), without repetition, and not empty"
            )
        if len({codebook.dtype for _, _, codebook in self.entries}) > 1:
            raise InvalidCodebook("the codebooks of a model must have the same dtype")

    @classmethod
    def of(cls, codebooks: Mapping[tuple[int, str], Codebook]) -> "Codebooks":
        """Build from a mapping (layer, plane) → codebook."""
        return cls(tuple((*key, codebooks[key]) for key in sorted(codebooks)))

    @cached_property
    def id(self) -> str:
        """64-bit hash of all codebooks and their keys, sixteen hexadecimal digits."""
        return _content_hash(*(f"{layer}/{plane}/{c.id}".encode() for layer, plane, c in self))

    @cached_property
    def _by_key(self) -> dict[tuple[int, str], Codebook]:
        return {(layer, plane): codebook for layer, plane, codebook in self.entries}

    def __getitem__(self, key: tuple[int, str]) -> Codebook:
        """Return the codebook of `(layer, plane)`.

        Raises:
            CodebookMissing: the artifact has no such codebook.
        """
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
                    "dtype": codebook.element.name,
                    "mode": codebook.mode.name.lower(),
                    "exponents": list(codebook.exponents),
                    "second": list(codebook.second),
                    "escape_rate": codebook.escape_rate,
                }
                for layer, plane, codebook in self
            ],
        }
        Path(path).write_text(json.dumps(artifact, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Codebooks":
        """Read an artifact and verify its id.

        Raises:
            InvalidCodebook: the file is not a valid artifact.
            OSError: the file cannot be read.
        """
        try:
            artifact = json.loads(Path(path).read_text(encoding="utf-8"))
            if (artifact["format"], artifact["version"]) != (_ARTIFACT, _ARTIFACT_VERSION):
                raise InvalidCodebook(
                    f"{path} is not a {_ARTIFACT} artifact of version {_ARTIFACT_VERSION}"
                )
            loaded = cls(tuple(_entry(item) for item in artifact["codebooks"]))
            stated = artifact["id"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidCodebook(f"{path} is not a codebook artifact: {error!r}") from error
        if loaded.id != stated:
            raise InvalidCodebook(f"{path} has id {stated}, but its content has id {loaded.id}")
        return loaded


def _entry(item: dict[str, Any]) -> tuple[int, str, Codebook]:
    codebook = Codebook(
        tuple(int(exponent) for exponent in item["exponents"]),
        Mode[item["mode"].upper()],
        tuple(int(exponent) for exponent in item["second"]),
        BY_NAME[item["dtype"]].dtype,
        float(item["escape_rate"]),
    )
    return int(item["layer"]), str(item["plane"]), codebook
