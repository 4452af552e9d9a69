"""Planes grouped by mode, with the device tensors that describe them to the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from codec.codebook import Codebook
from codec.format import WORD_BYTES, Geometry, Layout, Mode, SegmentHeader, overflow_words
from codec.gpu import kernels

_PLANE_FIELDS = int(kernels.PLANE_FIELDS)


@dataclass(frozen=True)
class PlaneGroup:
    """Planes of the same mode, which one launch processes.

    Attributes:
        planes: number of planes.
        rows: int64 `[planes, PLANE_FIELDS]` on the device; see `kernels/parameters.py`.
        start: offset of the first plane and, if evenly spaced, distance between planes, in
            elements.
        streams: offsets of the first plane's streams, and distance between blocks, in words.
        evenly_spaced: whether the distances between consecutive planes, and between consecutive
            blocks, are constant.
        encoding: first- and second-level code tables, uint8 `[planes, 256]` each; empty if raw.
        decoding: first- and second-level exponents, uint8 `[planes, 16]` each; empty if raw.
        options: compile-time configuration of the kernels.
    """

    planes: int
    rows: Tensor
    start: tuple[int, int]
    streams: tuple[int, ...]
    evenly_spaced: bool
    encoding: tuple[Tensor, ...] = ()
    decoding: tuple[Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def group_planes(
    starts: Sequence[int],
    codebooks: Sequence[Codebook | None],
    geometry: Geometry,
    layout: Layout,
    device: torch.device,
) -> list[PlaneGroup]:
    """Group planes by mode and by whether their codes need a table.

    Args:
        starts: offset of each plane from the base address, in elements.
    """
    rows: dict[tuple[Mode, bool], list[list[int]]] = {}
    books: dict[tuple[Mode, bool], list[Codebook]] = {}
    coded = 0
    for number, (start, book) in enumerate(zip(starts, codebooks, strict=True)):
        key = (Mode.RAW, True) if book is None else (book.mode, book.is_window)
        streams = [at // WORD_BYTES for at in layout.blocks[number].streams]
        row = [start, 0, number * geometry.num_chunks, coded * geometry.num_chunks, *streams]
        if book is not None:
            row[1], coded = book.exponents[0], coded + 1
            books.setdefault(key, []).append(book)
        rows.setdefault(key, []).append(row)
    return [_group(rows[key], books.get(key, []), device) for key in rows]


def used_codebooks(
    header: SegmentHeader, codebooks: Sequence[Codebook | None]
) -> list[Codebook | None]:
    """Return the codebook of each plane of a segment, None for planes that are stored raw."""
    pairs = zip(header.planes, codebooks, strict=True)
    return [None if plane.mode is Mode.RAW else book for plane, book in pairs]


def _group(rows: list[list[int]], books: list[Codebook], device: torch.device) -> PlaneGroup:
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(rows)]
    first, step = rows[0], steps[0] if steps else [0] * len(rows[0])
    evenly_spaced = all(s[0] == step[0] and set(s[4:]) == {step[4]} for s in steps)
    padded = [row + [0] * (_PLANE_FIELDS - len(row)) for row in rows]
    group = PlaneGroup(
        len(rows),
        torch.tensor(padded).to(device),
        (first[0], step[0]),
        (*padded[0][4:7], step[4]),
        evenly_spaced,
    )
    if not books:
        return group
    return replace(
        group,
        encoding=(
            _bytes([book.code_table for book in books], 256, device),
            _bytes([book.second_table for book in books], 256, device),
        ),
        decoding=(
            _bytes([bytes(book.exponents) for book in books], 16, device),
            _bytes([bytes(book.second) for book in books], 16, device),
        ),
        options=_options(books[0]),
    )


def _options(book: Codebook) -> dict[str, Any]:
    """Return the kernels' compile-time configuration for the planes of this codebook's group."""
    element, mode = book.element, book.mode
    return {
        "MANTISSA_BITS": element.mantissa_bits,
        "EXPONENT_MASK": element.exponents - 1,
        "REMAINDER_WIDTHS": element.remainder_widths,
        "CODE_BITS": mode.code_bits,
        "HAS_ESCAPE_CODE": mode.has_escape_code,
        "IS_WINDOW": book.is_window,
        "OVERFLOW_WORDS": overflow_words(element, mode),
    }


def _bytes(tables: Sequence[bytes], size: int, device: torch.device) -> Tensor:
    """Return uint8 `[tables, size]`, with short tables padded with zeros."""
    data = bytearray(b"".join(table.ljust(size, b"\0") for table in tables))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)
