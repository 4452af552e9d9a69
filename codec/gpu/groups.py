"""Properties of planes for which kernels are compiled and CUDA graphs are captured."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from codec.checksum import KEYS
from codec.codebook import Codebook
from codec.elements import ElementType
from codec.errors import InvalidPlanes
from codec.format import (
    CHUNK,
    COLUMN,
    COLUMNS,
    MAX_LISTED,
    MAX_NIBBLES,
    WORD_BYTES,
    Mode,
    header_bytes,
    overflow_words,
)

_ESCAPE_SCRATCH_WORDS = MAX_NIBBLES // 4 + MAX_LISTED
"""Scratch words of a chunk: a byte for each second-level code, a word for each listed escape."""


@dataclass(frozen=True)
class PlaneGroup:
    """Planes of a segment that have the same mode, which one launch processes.

    Attributes:
        numbers: indices of the planes in the segment.
        is_window: whether the codebooks' exponents are consecutive; True for raw planes.
    """

    element: ElementType
    mode: Mode
    is_window: bool
    numbers: tuple[int, ...]

    @cached_property
    def options(self) -> dict[str, Any]:
        """Compile-time configuration of the kernels; empty for raw planes."""
        if self.mode is Mode.RAW:
            return {}
        return {
            "MANTISSA_BITS": self.element.mantissa_bits,
            "EXPONENT_MASK": self.element.exponents - 1,
            "REMAINDER_WIDTHS": self.element.remainder_widths,
            "CODE_BITS": self.mode.code_bits,
            "HAS_ESCAPE_CODE": self.mode.has_escape_code,
            "IS_WINDOW": self.is_window,
            "OVERFLOW_WORDS": overflow_words(self.element, self.mode),
        }

    @property
    def scratch_words(self) -> int:
        """Scratch words of a chunk."""
        if self.mode is Mode.RAW:
            return 0
        listed = _ESCAPE_SCRATCH_WORDS if self.mode.has_escape_code else 0
        return max(COLUMNS * overflow_words(self.element, self.mode), listed)


@dataclass(frozen=True)
class PlaneShape:
    """Everything that the launches depend on, except the number of segments and pages.

    Attributes:
        page_stride, head_stride: strides in units of the element type.
        run_elements: number of elements of a full run (one head in one page).
        aligned: whether full chunks are aligned to eight elements, and planes to 16 bytes.
        paged: whether the planes have several pages.
        groups: planes by mode.
    """

    element: ElementType
    kv_heads: int
    page_stride: int
    head_stride: int
    run_elements: int
    aligned: bool
    paged: bool
    groups: tuple[PlaneGroup, ...]

    @classmethod
    def of(
        cls, planes: Sequence[Tensor], codebooks: Sequence[Codebook | None], element: ElementType
    ) -> "PlaneShape":
        """Return the shape of planes `[page, kv_head, slot, dim]`, viewed as stored units.

        Raises:
            InvalidPlanes: the planes have different strides.
        """
        _check_strides(planes)
        pages, kv_heads, slots, dim = planes[0].shape
        page_stride, head_stride, *_ = planes[0].stride()
        return cls(
            element,
            kv_heads,
            page_stride,
            head_stride,
            slots * dim,
            _is_aligned(planes),
            pages > 1,
            _groups(codebooks, element),
        )

    @cached_property
    def run_sizes(self) -> tuple[int, int, int]:
        """Kernel arguments `run_chunks`, `run_elements` and `run_columns`."""
        run = self.run_elements
        return max(-(-run // CHUNK), 1), run, -(-run // COLUMN)

    @property
    def planes(self) -> int:
        return sum(len(group.numbers) for group in self.groups)

    @property
    def coded_planes(self) -> int:
        """Number of planes with codes."""
        return sum(len(group.numbers) for group in self.groups if group.options)

    @property
    def header_words(self) -> int:
        """Number of 32-bit words of the header of a segment."""
        return header_bytes(self.planes) // WORD_BYTES

    @cached_property
    def scratch_stride(self) -> int:
        """Scratch words of a chunk, for any mode of the planes."""
        return max(group.scratch_words for group in self.groups)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Compile-time configuration that all kernels of the planes share."""
        return {
            "ELEMENT_BYTES": self.element.size,
            "ALIGNED": self.aligned,
            "PAGED": self.paged,
            "KEYS": KEYS,
            "num_warps": 1,
        }


def _groups(codebooks: Sequence[Codebook | None], element: ElementType) -> tuple[PlaneGroup, ...]:
    """Group planes by mode and by whether their codes need a table."""
    numbers: dict[tuple[Mode, bool], list[int]] = {}
    for number, book in enumerate(codebooks):
        key = (Mode.RAW, True) if book is None else (book.mode, book.is_window)
        numbers.setdefault(key, []).append(number)
    return tuple(PlaneGroup(element, *key, tuple(planes)) for key, planes in numbers.items())


def _check_strides(planes: Sequence[Tensor]) -> None:
    """Raise `InvalidPlanes` unless all planes have equal strides, as the kernels assume."""
    shape = planes[0].shape
    kinds = {
        tuple(stride for stride, size in zip(plane.stride(), shape, strict=True) if size > 1)
        for plane in planes
    }
    if len(kinds) > 1:
        raise InvalidPlanes(f"on a GPU all planes of a segment must have the same strides: {kinds}")


def _is_aligned(planes: Sequence[Tensor]) -> bool:
    """Return whether full chunks are aligned to eight elements, and planes to 16 bytes."""
    if any(plane.data_ptr() % 16 for plane in planes):
        return False
    shape = planes[0].shape
    strides = planes[0].stride()
    return all(
        size == 1 or stride % 8 == 0 for size, stride in zip(shape[:2], strides[:2], strict=True)
    )
