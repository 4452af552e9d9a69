"""Corrupted payloads raise a typed error and never return wrong content."""

import random

import pytest
import torch

import codec
from codec.backend import Backend
from codec.errors import PayloadError
from tests.codec.payloads import (
    LEVELS,
    decode_error,
    encoded,
    layout_of,
    signed,
    with_words,
    words_of,
)
from tests.codec.samples import BACKENDS, BOOKS, Pages, bits, make_pages

HEADER = 96
"""Length of the header of a segment with two planes, in bytes."""


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["bf16-top16-gaps", *LEVELS])
def test_flipped_bit_is_detected_unless_it_is_padding(name: str) -> None:
    """Bits are flipped in every byte for the CPU backend, in every seventh for the reference."""
    codebook = BOOKS[name]
    source = make_pages(5, num_planes=1, kv_heads=2, slots=4, dim=17, kind=0.03, book=codebook)
    bits(source.planes[0])[source.ids[0], 1] = 3 << codebook.element.mantissa_bits
    payload = encoded(source, [codebook])
    layout = layout_of(payload)
    coded, columns = layout.coded_chunks, 2 * (3 + 1)
    ends = [(80 + 4 * (coded + 1), layout.blocks[0].streams[0])]
    streams = (*layout.blocks[0].streams, layout.entries)
    widths = [codebook.mode.code_bits, *codebook.element.remainder_widths]
    for start, end, width in zip(streams, streams[1:], widths, strict=False):
        ends.append((start + 4 * width * columns, end))
    entry_words = words_of(payload, layout.starts, layout.starts + 4 * (coded + 1))[-1]
    assert entry_words
    ends.append((layout.entries + 4 * entry_words, len(payload)))
    padding = {at for start, end in ends for at in range(start, end)}
    assert padding
    for at in range(len(payload)):
        for flip in (1, 0x10, 0x80, 0xFF):
            damaged = payload.clone()
            damaged[at] ^= flip
            names = BACKENDS if at % 7 == 0 else ["cpu"]
            errors = [decode_error(damaged, source, codebook, BACKENDS[name]) for name in names]
            assert len({type(error) for error in errors}) == 1, (at, errors)
            assert (errors[0] is None) == (at in padding), at


@pytest.mark.parametrize("seed", range(10))
def test_garbage_after_a_valid_header_is_detected(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    garbage = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=generator)
    damaged = payload.clone()
    table = layout_of(payload).blocks[0].streams[0]
    somewhere = int(torch.randint(table, len(payload), (1,), generator=generator))
    start = HEADER if seed % 3 == 0 else table if seed % 3 == 1 else somewhere
    damaged[start:] = garbage[start:]
    errors = [decode_error(damaged, source, codebook, backend) for backend in BACKENDS.values()]
    assert isinstance(errors[0], PayloadError)
    assert type(errors[0]) is type(errors[1])


FUZZED = [
    "bf16-top16-window", "bf16-top16-gaps", "bf16-inband-window", "bf16-three_bit-window",
    "bf16-three_bit-gaps", "fp16-top16-window", "fp16-inband-gaps", "e5m2-top16-gaps",
    "e5m2-inband-window", "e4m3-three_bit-window",
]  # fmt: skip


def small_segment(book: codec.Codebook) -> tuple[Pages, list[codec.Codebook | None], bytes]:
    """Return a segment's pages, codebooks and payload.

    It has two planes with codes, one raw plane, and uncoded chunks.
    """
    source = make_pages(5, num_planes=3, kv_heads=2, slots=4, dim=20, kind=0.04, book=book)
    first = source.planes[0].view(torch.int16 if book.element.size == 2 else torch.uint8)
    first[source.ids[0], 1] = torch.arange(80).view(4, 20) << 3
    books = [book, None, book]
    return source, books, encoded(source, books).numpy().tobytes()


def swapped(data: bytearray, first: int, second: int, size: int) -> None:
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )


def mutated(data: bytes, parts: list[tuple[int, int]], rng: random.Random) -> bytes:
    """Apply a few random mutations to bits, bytes, ranges, words, entry starts or blocks."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        start, size = rng.randrange(len(damaged)), rng.choice((1, 2, 4, 8, 16, 40))
        other = rng.randrange(len(damaged))
        match rng.randrange(9):
            case 0:
                damaged[start] ^= 1 << rng.randrange(8)
            case 1:
                damaged[start : start + size] = rng.randbytes(len(damaged[start : start + size]))
            case 2:
                damaged[start] = rng.choice((0, 1, 2, 3, 4, 16, 32, 127, 253, 254, 255))
            case 3:
                damaged[start : start + size] = damaged[other : other + size]
            case 4 if max(start, other) + size <= len(damaged):
                swapped(damaged, start, other, size)
            case 5 if len(damaged) == len(data):
                begin, end = rng.choice(parts)
                first, second = (rng.randrange(begin, end, 4) for _ in range(2))
                swapped(damaged, first, second, rng.choice((4, 4, 16)))
            case 6 if len(damaged) == len(data):
                begin, end = rng.choice(parts)
                at = rng.randrange(begin, end, 4)
                word = rng.choice((0, 1, 2, rng.randrange(200), rng.getrandbits(26), 2**32 - 1))
                damaged[at : at + 4] = word.to_bytes(4, "little")
            case 7 if len(damaged) == len(data):
                begin, end = parts[1]
                swapped(damaged, begin, parts[2][0], end - begin)
            case 8 if rng.random() < 0.2:
                del damaged[rng.randrange(1, len(damaged)) :]
    return bytes(damaged)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(10))
def test_mutated_payload_raises_or_decodes_to_the_content(seed: int) -> None:
    """10,000 mutations per seed; every 50th is also decoded by the reference."""
    source, books, data = small_segment(book := BOOKS[FUZZED[seed]])
    layout = layout_of(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    first, _, last = layout.blocks
    table = (layout.starts, layout.starts + 4 * (layout.coded_chunks + 1))
    parts = [
        table,
        (first.streams[0], first.end),
        (last.streams[0], last.end),
        (layout.entries, len(data)),
    ]
    rng = random.Random(seed)
    met = set()
    for number in range(10_000):
        damaged = torch.frombuffer(bytearray(mutated(data, parts, rng)), dtype=torch.uint8)
        if rng.random() < 0.7:
            damaged = signed(damaged)
        error = decode_error(damaged, source, book, BACKENDS["cpu"], books)
        met.add(type(error))
        if number % 50 == 0:
            same = decode_error(damaged, source, book, BACKENDS["reference"], books)
            assert type(same) is type(error), (number, error, same)
    assert met >= {
        type(None), codec.FormatError, codec.TruncatedPayload, codec.CodebookMismatch,
        codec.ChecksumMismatch,
    }  # fmt: skip


def test_garbage_of_any_length_is_rejected(source: Pages, codebook: codec.Codebook) -> None:
    generator = torch.Generator().manual_seed(0)
    for length in [*range(200), 4096]:
        garbage = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        for start in (b"", b"HRSZ", b"HRSZ\x03\x00\x01\x00"):
            head = torch.tensor(list(start[:length]), dtype=torch.uint8)
            damaged = torch.cat([head, garbage[len(head) :]])
            error = decode_error(damaged, source, codebook, BACKENDS["cpu"])
            assert isinstance(error, codec.FormatError)
            with pytest.raises(codec.FormatError):
                codec.decode(damaged, codebook, (-1,))


@pytest.mark.parametrize("book", [*BOOKS.values(), None])
def test_swapped_planes_are_detected(book: codec.Codebook | None, backend: Backend) -> None:
    """The modified payload is a valid encoding, so only the checksum detects the swap."""
    source = make_pages(16, kind=0.0, book=book or BOOKS["bf16-top16-window"])
    payload = encoded(source, [book] * 2)
    layout = layout_of(payload)
    start, end = layout.blocks[0].streams[0], layout.entries
    blocks = payload[start:end].view(2, -1)
    payload[start:end] = blocks.flip(0).reshape(-1)
    books: list[codec.Codebook | None] = [book] * 2
    error = decode_error(payload, source, BOOKS["bf16-top16-window"], backend, books)
    assert isinstance(error, codec.ChecksumMismatch)


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (2, 31)])
@pytest.mark.parametrize("name", BOOKS)
def test_swapped_columns_are_detected(name: str, backend: Backend, other: tuple[int, int]) -> None:
    """Swap all words of the first column and column `other` (chunk, column)."""
    book = BOOKS[name]
    source = make_pages(16, num_planes=1, kind=0.0, book=book)
    payload = encoded(source, [book])
    widths = [book.mode.code_bits, *book.element.remainder_widths]
    for start, width in zip(layout_of(payload).blocks[0].streams, widths, strict=True):
        together = 1 if width == 3 else 4
        chunks = payload[start : start + 3 * 32 * 4 * width].view(3, -1, 32, 4 * together)
        first, second = chunks[0, :, 0], chunks[other[0], :, other[1]]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    assert isinstance(decode_error(payload, source, book, backend), codec.ChecksumMismatch)


def test_swapped_entries_of_two_chunks_are_detected(
    codebook: codec.Codebook, backend: Backend
) -> None:
    """Each of the two chunks has one entry, and both entries state the same position."""
    source = make_pages(16, num_planes=1, kind=0.0)
    patterns = bits(source.planes[0])
    patterns[source.ids[0], :, 0, 0] = torch.tensor([7, 8, 9], dtype=torch.int16) << 7
    payload = encoded(source, [codebook])
    at = layout_of(payload).entries
    words = words_of(payload, at, at + 12)
    swapped = with_words(payload, at, [words[1], words[0], words[2]])
    assert isinstance(decode_error(swapped, source, codebook, backend), codec.ChecksumMismatch)
