"""Planes by mode, with all that kernels have to know of them and of their codebooks on a device."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from codec.codebook import Codebook
from codec.format import WORD_BYTES, Geometry, Layout, Mode, spilled_words
from codec.gpu import kernels

_ROW = int(kernels.ROW)


@dataclass(frozen=True)
class Group:
    """The planes of one mode, which one launch takes.

    Attributes:
        rows: see `kernels`.
        start: where the first plane starts and how far apart they lie, in elements, if all of them
            are even in this and in what follows.
        streams: where the first one's streams start, and how far apart blocks lie, in words.
        encoding, decoding: tables of codes and of the second level, and of exponents; none if the
            planes are raw.
        options: what kernels are compiled for.
    """

    planes: int
    rows: Tensor
    start: tuple[int, int]
    streams: tuple[int, ...]
    even: bool
    encoding: tuple[Tensor, ...] = ()
    decoding: tuple[Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def groups_of(
    starts: Sequence[int],
    codebooks: Sequence[Codebook | None],
    geometry: Geometry,
    layout: Layout,
    device: torch.device,
) -> list[Group]:
    """The planes by mode, and by whether their codes need a table."""
    rows: dict[tuple[Mode, bool], list[list[int]]] = {}
    books: dict[tuple[Mode, bool], list[Codebook]] = {}
    coded = 0
    for number, (start, book) in enumerate(zip(starts, codebooks, strict=True)):
        kind = (Mode.RAW, True) if book is None else (book.mode, book.is_window)
        streams = [at // WORD_BYTES for at in layout.blocks[number].streams]
        row = [start, 0, number * geometry.num_chunks, coded * geometry.num_chunks, *streams]
        if book is not None:
            row[1], coded = book.exponents[0], coded + 1
            books.setdefault(kind, []).append(book)
        rows.setdefault(kind, []).append(row)
    return [_group(rows[kind], books.get(kind, []), device) for kind in rows]


def _group(rows: list[list[int]], books: list[Codebook], device: torch.device) -> Group:
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(rows)]
    first, step = rows[0], steps[0] if steps else [0] * len(rows[0])
    even = all(s[0] == step[0] and set(s[4:]) == {step[4]} for s in steps)
    padded = [row + [0] * (_ROW - len(row)) for row in rows]
    group = Group(
        len(rows),
        torch.tensor(padded).to(device),
        (first[0], step[0]),
        (*padded[0][4:7], step[4]),
        even,
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
    """What kernels are compiled for, of planes with codebooks like this one."""
    element, mode = book.element, book.mode
    return {
        "SHIFT": element.mantissa_bits,
        "MASK": element.exponents - 1,
        "RESTS": element.remainder_widths,
        "BITS": mode.code_bits,
        "ESCAPES": mode.has_escape_code,
        "WINDOW": book.is_window,
        "SPILLED": spilled_words(element, mode),
    }


def _bytes(tables: Sequence[bytes], size: int, device: torch.device) -> Tensor:
    """u8 `[tables, size]`, zeros behind what is shorter."""
    data = bytearray(b"".join(table.ljust(size, b"\0") for table in tables))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)
