"""Invalid entry starts and entries are rejected before anything is written."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import codec
from codec.backend import Backend
from codec.format import Mode
from tests.codec.payloads import (
    LEVELS,
    LISTS,
    decode_error,
    encoded,
    layout_of,
    with_words,
    words_of,
)
from tests.codec.samples import BOOKS, Pages, from_bits, make_pages

STARTS: dict[str, Callable[[list[int]], list[int]]] = {
    "first start not zero": lambda s: [1, *s[1:]],
    "descending starts": lambda s: [*s[:2], s[1] - 1, *s[3:]],
    "huge start in the middle": lambda s: [*s[:3], 2**32 - 1, *s[4:]],
    "total too large": lambda s: [*s[:-1], s[-1] + 4],
    "total too small": lambda s: [*s[:-1], s[-1] - 4],
    "total of 2^32 - 1": lambda s: [*s[:-1], 2**32 - 1],
    "all entries in the last chunk": lambda s: [0] * (len(s) - 1) + s[-1:],
    "all entries in the first chunk": lambda s: [0] + s[-1:] * (len(s) - 1),
}


@pytest.mark.parametrize("damage", STARTS)
@pytest.mark.parametrize("name", ["bf16-top16-window", "fp16-inband-gaps", "e4m3-three_bit-gaps"])
def test_invalid_starts_are_rejected(name: str, backend: Backend, damage: str) -> None:
    book = BOOKS[name]
    source = make_pages(17, kind="random", book=book)
    payload = encoded(source, [book] * 2)
    layout = layout_of(payload)
    starts = words_of(payload, layout.starts, layout.starts + 4 * (layout.coded_chunks + 1))
    assert min(b - a for a, b in pairwise(starts)) > 0
    damaged = with_words(payload, layout.starts, STARTS[damage](starts))
    assert type(decode_error(damaged, source, book, backend)) is codec.FormatError


def chunk_with_escapes(book: codec.Codebook) -> tuple[Pages, torch.Tensor, int]:
    """Return 300 elements with three listed escapes, the payload, and the offset of its entries."""
    third = next(e for e in range(book.element.exponents) if e not in book.exponents + book.second)
    patterns = torch.full((300,), book.exponents[3] << book.element.mantissa_bits)
    patterns[[3, 150, 299]] = third << book.element.mantissa_bits
    plane = from_bits(patterns, book.dtype).view(1, 1, 300, 1)
    source = Pages([plane], [0], 300, torch.Generator())
    payload = encoded(source, [book])
    return source, payload, layout_of(payload).entries


WORDS: dict[str, Callable[[list[int], int], list[int]]] = {
    "unused bit set": lambda w, bits: [w[0] | 1 << 10, *w[1:]],
    "highest bit set": lambda w, bits: [*w[:2], w[2] | 1 << 31],
    "exponent out of range": lambda w, bits: [w[0], w[1] | 1 << 16 + bits, w[2]],
    "repeated entry": lambda w, bits: [w[0], w[0], w[2]],
    "descending positions": lambda w, bits: [w[1], w[0], w[2]],
    "position beyond the columns": lambda w, bits: [*w[:2], w[2] & ~1023 | 320],
    "position in the padding": lambda w, bits: [*w[:2], w[2] & ~1023 | 319],
    "position 1023": lambda w, bits: [*w[:2], w[2] | 1023],
    "all zeros": lambda w, bits: [0, 0, 0],
    "all ones": lambda w, bits: [2**32 - 1] * 3,
}


@pytest.mark.parametrize("damage", WORDS)
@pytest.mark.parametrize("name", LISTS + LEVELS)
def test_invalid_entry_positions_and_exponents_are_rejected(
    name: str, backend: Backend, damage: str
) -> None:
    book = BOOKS[name]
    source, payload, at = chunk_with_escapes(book)
    at += 4 * (book.mode is not Mode.TOP16)
    words = WORDS[damage](words_of(payload, at, at + 12), book.element.exponent_bits)
    error = decode_error(with_words(payload, at, words), source, book, backend)
    assert type(error) is codec.FormatError


@pytest.mark.parametrize("nibbles", [0x1FFF, 0xF0000FFF, 0xFF, 0x2FF, 0xEFF, 0, 0xFFFF])
@pytest.mark.parametrize("name", LEVELS)
def test_invalid_second_level_codes_are_rejected(name: str, backend: Backend, nibbles: int) -> None:
    """All three escapes are listed, so the only valid word is 0xFFF: three codes of 15."""
    book = BOOKS[name]
    source, payload, at = chunk_with_escapes(book)
    assert words_of(payload, at, at + 4) == [0xFFF]
    error = decode_error(with_words(payload, at, [nibbles]), source, book, backend)
    assert type(error) is codec.FormatError


@pytest.mark.parametrize("name", [name for name in LEVELS if name.endswith("gaps")])
def test_second_level_code_without_exponent_is_rejected(name: str, backend: Backend) -> None:
    book = BOOKS[name]
    plane = torch.full((300,), book.exponents[3] << book.element.mantissa_bits)
    plane[70] = book.second[0] << book.element.mantissa_bits
    source = Pages([from_bits(plane, book.dtype).view(1, 1, 300, 1)], [0], 300, torch.Generator())
    payload = encoded(source, [book])
    at = layout_of(payload).entries
    for nibble in range(1, 16):
        error = decode_error(with_words(payload, at, [nibble]), source, book, backend)
        known = nibble < len(book.second)
        assert type(error) is (codec.ChecksumMismatch if known else codec.FormatError), nibble


@pytest.mark.parametrize("name", LEVELS)
def test_escape_codes_without_entries_are_rejected(name: str, backend: Backend) -> None:
    """All codes are overwritten with the escape code, but there are entries for only three."""
    book = BOOKS[name]
    source, payload, _ = chunk_with_escapes(book)
    start = layout_of(payload).blocks[0].streams[0]
    ones = with_words(payload, start, [2**32 - 1] * 10 * book.mode.code_bits)
    assert type(decode_error(ones, source, book, backend)) is codec.FormatError
