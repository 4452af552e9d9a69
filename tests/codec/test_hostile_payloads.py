"""Damaged, truncated and foreign payloads end in a typed error and leave the pages alone."""

import random
import struct
import zlib
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import codec
from codec.errors import CodecError, PayloadError
from codec.format import Layout, Mode
from codec.mix import mix64
from codec.ops import Backend
from tests.codec.samples import BACKENDS, BOOKS, Pages, bits, from_bits, make_pages

HEADER = 96
"""Bytes of the header of two planes."""
FIELDS = {
    "magic": ("<4s", 0, b"HRSX"),
    "version": ("<H", 4, 2),
    "element type": ("<B", 6, 9),
    "another element type": ("<B", 6, 2),
    "reserved": ("<B", 7, 8),
    "planes": ("<I", 8, 1),
    "no planes": ("<I", 8, 0),
    "many planes": ("<I", 8, 2**32 - 1),
    "heads": ("<I", 12, 2),
    "no heads": ("<I", 12, 0),
    "dim": ("<I", 16, 32),
    "no dim": ("<I", 16, 0),
    "tokens": ("<Q", 24, 18),
    "no tokens": ("<Q", 24, 0),
    "many tokens": ("<Q", 24, 2**64 - 1),
    "slots": ("<Q", 32, 8),
    "no slots": ("<Q", 32, 0),
    "shorter": ("<Q", 40, 4096),
    "longer": ("<Q", 40, 2**40),
    "checksum": ("<Q", 48, 1),
    "no mode": ("<B", 64, 0),
    "another mode": ("<B", 64, 2),
    "unknown mode": ("<B", 64, 4),
    "plane reserved": ("<B", 70, 1),
    "codebook": ("<Q", 72, 1),
}
LISTS = ["bf16-top16-window", "fp16-top16-gaps", "e5m2-top16-window"]
LEVELS = ["bf16-inband-window", "bf16-three_bit-gaps", "fp16-three_bit-gaps", "e4m3-three_bit-gaps"]


def encoded(source: Pages, books: list[codec.Codebook | None]) -> torch.Tensor:
    out = torch.empty(source.bound, dtype=torch.uint8)
    written = codec.encode_pages(source.planes, books, source.ids, source.num_tokens, out)
    return out[: written.length].clone()


@pytest.fixture
def source() -> Pages:
    return make_pages(17, kind="mixed")


@pytest.fixture
def payload(source: Pages, codebook: codec.Codebook) -> torch.Tensor:
    return encoded(source, [codebook] * 2)


def layout_of(payload: torch.Tensor) -> Layout:
    return codec.read_header(payload).layout


def words_of(payload: torch.Tensor, start: int, end: int) -> list[int]:
    data = payload[start:end].numpy().tobytes()
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def with_words(payload: torch.Tensor, start: int, words: list[int]) -> torch.Tensor:
    data = bytearray(payload.numpy().tobytes())
    struct.pack_into(f"<{len(words)}I", data, start, *words)
    return torch.frombuffer(data, dtype=torch.uint8)


def signed(payload: torch.Tensor) -> torch.Tensor:
    """The payload with a CRC and a seal that match: what a buggy sender might emit."""
    data = bytearray(payload.numpy().tobytes())
    if len(data) >= 64:
        planes = min(struct.unpack_from("<I", data, 8)[0], (len(data) - 64) // 16)
        crc = zlib.crc32(data[:20] + data[24:40] + data[64 : 64 + 16 * planes])
        length, checksum = struct.unpack_from("<QQ", data, 40)
        struct.pack_into("<I", data, 20, crc)
        struct.pack_into("<Q", data, 56, mix64(length ^ mix64(checksum ^ crc)))
    return torch.frombuffer(data, dtype=torch.uint8)


def refused(
    payload: torch.Tensor,
    source: Pages,
    codebook: codec.Codebook,
    backend: Backend,
    books: list[codec.Codebook | None] | None = None,
) -> PayloadError | None:
    """The error that the payload meets, after a look at the pages; `None` if it decodes."""
    target = source.empty_like()
    before = [bits(plane).clone() for plane in target.planes]
    books = books or [codebook] * len(target.planes)
    try:
        codec.decode_pages(
            payload, target.planes, books, target.ids, source.num_tokens, backend=backend
        )
    except PayloadError as error:
        if not isinstance(error, codec.ChecksumMismatch):
            for plane, bits_before in zip(target.planes, before, strict=True):
                assert torch.equal(bits(plane), bits_before)
        return error
    assert torch.equal(target.content(), source.content())
    return None


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("resigned", [False, True])
def test_every_header_field_is_validated(
    payload: torch.Tensor,
    source: Pages,
    codebook: codec.Codebook,
    backend: Backend,
    name: str,
    resigned: bool,
) -> None:
    kind, at, value = FIELDS[name]
    data = bytearray(payload.numpy().tobytes())
    struct.pack_into(kind, data, at, value)
    damaged = torch.frombuffer(data, dtype=torch.uint8)
    error = refused(signed(damaged) if resigned else damaged, source, codebook, backend)
    expected: type[PayloadError] = codec.FormatError
    if resigned and name == "checksum":
        expected = codec.ChecksumMismatch
    if resigned and name == "codebook":
        expected = codec.CodebookMismatch
    assert isinstance(error, expected), error


@pytest.mark.parametrize("field", ["CRC", "seal"])
def test_the_header_is_bound_to_its_crc_and_its_seal(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, backend: Backend, field: str
) -> None:
    payload[20 if field == "CRC" else 56] ^= 1
    assert isinstance(refused(payload, source, codebook, backend), codec.FormatError)


@pytest.mark.parametrize("mode", [1, 2])
def test_a_mode_that_saves_nothing_is_no_mode(mode: int) -> None:
    book = BOOKS["e4m3-three_bit-window"]
    payload = codec.encode(torch.ones(5, dtype=book.dtype), book)
    payload[64] = mode
    with pytest.raises(codec.FormatError, match="saves nothing"):
        codec.decode(signed(payload), book)


@pytest.mark.parametrize("name", ["bf16-top16-gaps", *LEVELS])
def test_a_flipped_bit_shows_unless_it_is_padding(name: str) -> None:
    """Every 7th byte is damaged for the reference too."""
    codebook = BOOKS[name]
    source = make_pages(5, num_planes=1, kv_heads=2, slots=4, dim=17, kind=0.03, book=codebook)
    bits(source.planes[0])[source.ids[0], 1] = 3 << codebook.element.mantissa_bits
    payload = encoded(source, [codebook])
    layout = layout_of(payload)
    coded, columns = layout.coded_chunks, 2 * (3 + 1)
    ends = [(80 + 4 * (coded + 1), layout.blocks[0].start)]
    streams = (*layout.blocks[0].streams, layout.entries)
    widths = [codebook.mode.code_bits, *codebook.element.remainder_widths]
    for start, end, width in zip(streams, streams[1:], widths, strict=False):
        ends.append((start + 4 * width * columns, end))
    units = words_of(payload, layout.starts, layout.starts + 4 * (coded + 1))[-1]
    assert units
    ends.append((layout.entries + 4 * units, len(payload)))
    padding = {at for start, end in ends for at in range(start, end)}
    assert padding
    for at in range(len(payload)):
        for flip in (1, 0x10, 0x80, 0xFF):
            damaged = payload.clone()
            damaged[at] ^= flip
            names = BACKENDS if at % 7 == 0 else ["cpu"]
            errors = [refused(damaged, source, codebook, BACKENDS[name]) for name in names]
            assert len({type(error) for error in errors}) == 1, (at, errors)
            assert (errors[0] is None) == (at in padding), at


def test_every_truncation_is_told_apart(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook
) -> None:
    for length in range(0, len(payload), 7):
        error = refused(payload[:length].clone(), source, codebook, BACKENDS["cpu"])
        assert isinstance(error, codec.TruncatedPayload), length
    for length in range(len(payload)):
        with pytest.raises(codec.TruncatedPayload):
            codec.read_header(payload[:length])
    longer = torch.cat([payload, payload[:1]])
    assert isinstance(refused(longer, source, codebook, BACKENDS["cpu"]), codec.FormatError)


@pytest.mark.parametrize("more", [-16, 8, 16, 1 << 20])
def test_a_segment_has_the_length_that_its_entries_give_it(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, backend: Backend, more: int
) -> None:
    longer = torch.cat([payload, torch.zeros(max(more, 0), dtype=torch.uint8)])
    longer = longer[: len(payload) + more].clone()
    longer[40:48] = torch.tensor(list(len(longer).to_bytes(8, "little")))
    assert isinstance(refused(signed(longer), source, codebook, backend), codec.FormatError)


def test_another_codebook_is_refused(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook
) -> None:
    other = codec.Codebook((*codebook.exponents[1:], 130))
    another_mode = codec.Codebook(codebook.exponents[:15], Mode.INBAND)
    for books in ([other, other], [codebook, other], [codebook, None], [another_mode] * 2):
        with pytest.raises(codec.CodebookMismatch):
            codec.decode_pages(payload, source.planes, books, source.ids, 17)


STARTS: dict[str, Callable[[list[int]], list[int]]] = {
    "not from zero": lambda s: [1, *s[1:]],
    "descending": lambda s: [*s[:2], s[1] - 1, *s[3:]],
    "a chunk before zero": lambda s: [*s[:3], 2**32 - 1, *s[4:]],
    "more than there are": lambda s: [*s[:-1], s[-1] + 4],
    "fewer than there are": lambda s: [*s[:-1], s[-1] - 4],
    "far more": lambda s: [*s[:-1], 2**32 - 1],
    "all in one chunk": lambda s: [0] * (len(s) - 1) + s[-1:],
    "all in the first": lambda s: [0] + s[-1:] * (len(s) - 1),
}


@pytest.mark.parametrize("damage", STARTS)
@pytest.mark.parametrize("name", ["bf16-top16-window", "fp16-inband-gaps", "e4m3-three_bit-gaps"])
def test_starts_are_validated_before_anything_is_written(
    name: str, backend: Backend, damage: str
) -> None:
    book = BOOKS[name]
    source = make_pages(17, kind="random", book=book)
    payload = encoded(source, [book] * 2)
    layout = layout_of(payload)
    starts = words_of(payload, layout.starts, layout.starts + 4 * (layout.coded_chunks + 1))
    assert min(b - a for a, b in pairwise(starts)) > 0
    damaged = with_words(payload, layout.starts, STARTS[damage](starts))
    assert type(refused(damaged, source, book, backend)) is codec.FormatError


def chunk_with_escapes(book: codec.Codebook) -> tuple[Pages, torch.Tensor, int]:
    """300 elements, ten columns, of which three are escapes at no level; where entries start."""
    third = next(e for e in range(book.element.exponents) if e not in book.exponents + book.second)
    patterns = torch.full((300,), book.exponents[3] << book.element.mantissa_bits)
    patterns[[3, 150, 299]] = third << book.element.mantissa_bits
    plane = from_bits(patterns, book.dtype).view(1, 1, 300, 1)
    source = Pages([plane], [0], 300, torch.Generator())
    payload = encoded(source, [book])
    return source, payload, layout_of(payload).entries


WORDS: dict[str, Callable[[list[int], int], list[int]]] = {
    "an unused bit": lambda w, bits: [w[0] | 1 << 10, *w[1:]],
    "the highest bit": lambda w, bits: [*w[:2], w[2] | 1 << 31],
    "no such exponent": lambda w, bits: [w[0], w[1] | 1 << 16 + bits, w[2]],
    "twice": lambda w, bits: [w[0], w[0], w[2]],
    "descending": lambda w, bits: [w[1], w[0], w[2]],
    "beyond the columns": lambda w, bits: [*w[:2], w[2] & ~1023 | 320],
    "in the padding": lambda w, bits: [*w[:2], w[2] & ~1023 | 319],
    "far beyond": lambda w, bits: [*w[:2], w[2] | 1023],
    "zeros": lambda w, bits: [0, 0, 0],
    "ones": lambda w, bits: [2**32 - 1] * 3,
}


@pytest.mark.parametrize("damage", WORDS)
@pytest.mark.parametrize("name", LISTS + LEVELS)
def test_positions_and_exponents_are_validated_before_anything_is_written(
    name: str, backend: Backend, damage: str
) -> None:
    book = BOOKS[name]
    source, payload, at = chunk_with_escapes(book)
    at += 4 * (book.mode is not Mode.TOP16)
    words = WORDS[damage](words_of(payload, at, at + 12), book.element.exponent_bits)
    error = refused(with_words(payload, at, words), source, book, backend)
    assert type(error) is codec.FormatError


@pytest.mark.parametrize("nibbles", [0x1FFF, 0xF0000FFF, 0xFF, 0x2FF, 0xEFF, 0, 0xFFFF])
@pytest.mark.parametrize("name", LEVELS)
def test_second_level_codes_are_validated_before_anything_is_written(
    name: str, backend: Backend, nibbles: int
) -> None:
    """All three are 15, and each has its word: 0xFFF."""
    book = BOOKS[name]
    source, payload, at = chunk_with_escapes(book)
    assert words_of(payload, at, at + 4) == [0xFFF]
    error = refused(with_words(payload, at, [nibbles]), source, book, backend)
    assert type(error) is codec.FormatError


@pytest.mark.parametrize("name", [name for name in LEVELS if name.endswith("gaps")])
def test_a_second_level_code_without_an_exponent_is_refused(name: str, backend: Backend) -> None:
    book = BOOKS[name]
    plane = torch.full((300,), book.exponents[3] << book.element.mantissa_bits)
    plane[70] = book.second[0] << book.element.mantissa_bits
    source = Pages([from_bits(plane, book.dtype).view(1, 1, 300, 1)], [0], 300, torch.Generator())
    payload = encoded(source, [book])
    at = layout_of(payload).entries
    for nibble in range(1, 16):
        error = refused(with_words(payload, at, [nibble]), source, book, backend)
        known = nibble < len(book.second)
        assert type(error) is (codec.ChecksumMismatch if known else codec.FormatError), nibble


@pytest.mark.parametrize("name", LEVELS)
def test_escape_codes_without_entries_are_refused(name: str, backend: Backend) -> None:
    """All codes of a chunk are escapes, more than 256 or than it has entries for."""
    book = BOOKS[name]
    source, payload, _ = chunk_with_escapes(book)
    start = layout_of(payload).blocks[0].streams[0]
    ones = with_words(payload, start, [2**32 - 1] * 10 * book.mode.code_bits)
    assert type(refused(ones, source, book, backend)) is codec.FormatError


@pytest.mark.parametrize("seed", range(30))
def test_garbage_streams_behind_a_valid_header(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    garbage = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=generator)
    damaged = payload.clone()
    table = layout_of(payload).blocks[0].start
    somewhere = int(torch.randint(table, len(payload), (1,), generator=generator))
    start = HEADER if seed % 3 == 0 else table if seed % 3 == 1 else somewhere
    damaged[start:] = garbage[start:]
    errors = [refused(damaged, source, codebook, backend) for backend in BACKENDS.values()]
    assert isinstance(errors[0], PayloadError)
    assert type(errors[0]) is type(errors[1])


FUZZED = [
    "bf16-top16-window", "bf16-top16-gaps", "bf16-inband-window", "bf16-three_bit-window",
    "bf16-three_bit-gaps", "fp16-top16-window", "fp16-inband-gaps", "e5m2-top16-gaps",
    "e5m2-inband-window", "e4m3-three_bit-window",
]  # fmt: skip


def small_segment(book: codec.Codebook) -> tuple[Pages, list[codec.Codebook | None], bytes]:
    """A few hundred bytes: two planes with codes, with entries and in full, and one raw plane."""
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
    """A few of: other bytes, bits, interesting values; moved, swapped and cut ranges; starts,
    columns and entries swapped within a part, and blocks of two planes."""
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


@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_mutations_end_in_an_error_or_the_content(seed: int) -> None:
    """10,000 for each seed; every 50th meets the reference too, which agrees."""
    source, books, data = small_segment(book := BOOKS[FUZZED[seed]])
    layout = layout_of(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    first, _, last = layout.blocks
    table = (layout.starts, layout.starts + 4 * (layout.coded_chunks + 1))
    parts = [table, (first.start, first.end), (last.start, last.end), (layout.entries, len(data))]
    rng, met = random.Random(seed), set()
    for number in range(10_000):
        damaged = torch.frombuffer(bytearray(mutated(data, parts, rng)), dtype=torch.uint8)
        if rng.random() < 0.7:
            damaged = signed(damaged)
        error = refused(damaged, source, book, BACKENDS["cpu"], books)
        met.add(type(error))
        if number % 50 == 0:
            same = refused(damaged, source, book, BACKENDS["reference"], books)
            assert type(same) is type(error), (number, error, same)
    assert met >= {
        type(None), codec.FormatError, codec.TruncatedPayload, codec.CodebookMismatch,
        codec.ChecksumMismatch,
    }  # fmt: skip


def test_garbage_of_any_length(source: Pages, codebook: codec.Codebook) -> None:
    generator = torch.Generator().manual_seed(0)
    for length in [*range(200), 4096]:
        garbage = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        for start in (b"", b"HRSZ", b"HRSZ\x03\x00\x01\x00"):
            head = torch.tensor(list(start[:length]), dtype=torch.uint8)
            damaged = torch.cat([head, garbage[len(head) :]])
            error = refused(damaged, source, codebook, BACKENDS["cpu"])
            assert isinstance(error, codec.FormatError)
            with pytest.raises(codec.FormatError):
                codec.decode(damaged, codebook)


@pytest.mark.parametrize("book", [*BOOKS.values(), None])
def test_swapped_planes_show(book: codec.Codebook | None, backend: Backend) -> None:
    """Every byte is valid, only the checksum knows."""
    source = make_pages(16, kind=0.0, book=book or BOOKS["bf16-top16-window"])
    payload = encoded(source, [book] * 2)
    layout = layout_of(payload)
    start, end = layout.blocks[0].start, layout.entries
    blocks = payload[start:end].view(2, -1)
    payload[start:end] = blocks.flip(0).reshape(-1)
    books: list[codec.Codebook | None] = [book] * 2
    error = refused(payload, source, BOOKS["bf16-top16-window"], backend, books)
    assert isinstance(error, codec.ChecksumMismatch)


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (2, 31)])
@pytest.mark.parametrize("name", BOOKS)
def test_swapped_columns_show(name: str, backend: Backend, other: tuple[int, int]) -> None:
    """The first column and another, of this chunk or of another one, exchange all their words."""
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
    assert isinstance(refused(payload, source, book, backend), codec.ChecksumMismatch)


def test_swapped_entries_of_two_chunks_show(codebook: codec.Codebook, backend: Backend) -> None:
    """Both chunks have one entry, at the same place."""
    source = make_pages(16, num_planes=1, kind=0.0)
    patterns = bits(source.planes[0])
    patterns[source.ids[0], :, 0, 0] = torch.tensor([7, 8, 9], dtype=torch.int16) << 7
    payload = encoded(source, [codebook])
    at = layout_of(payload).entries
    words = words_of(payload, at, at + 12)
    swapped = with_words(payload, at, [words[1], words[0], words[2]])
    assert isinstance(refused(swapped, source, codebook, backend), codec.ChecksumMismatch)


def test_a_small_output_is_refused_before_it_is_written(
    source: Pages, codebook: codec.Codebook, backend: Backend
) -> None:
    layout = layout_of(encoded(source, [codebook] * 2))
    out = torch.full((layout.bound - 1,), 0xA5, dtype=torch.uint8)
    with pytest.raises(codec.BufferTooSmall):
        codec.encode_pages(source.planes, [codebook] * 2, source.ids, 17, out, backend=backend)
    assert bool((out == 0xA5).all())


def test_arguments_that_do_not_fit_are_named(source: Pages, codebook: codec.Codebook) -> None:
    out = torch.empty(source.bound, dtype=torch.uint8)
    books: list[codec.Codebook | None] = [codebook] * 2

    def call(**changed: object) -> None:
        arguments: dict[str, object] = {
            "planes": source.planes,
            "codebooks": books,
            "page_ids": source.ids,
            "num_tokens": 17,
            "out": out,
        }
        codec.encode_pages(**(arguments | changed))  # type: ignore[arg-type]

    first = source.planes[0]
    wrong: list[tuple[type[CodecError], dict[str, object]]] = [
        (codec.InvalidPlanes, {"planes": []}),
        (codec.InvalidPlanes, {"codebooks": books[:1]}),
        (codec.InvalidPlanes, {"planes": [first, first[:2]]}),
        (codec.InvalidPlanes, {"planes": [first[0], first[0]]}),
        (codec.InvalidPlanes, {"planes": [first[..., ::2], first[..., ::2]]}),
        (codec.InvalidPlanes, {"planes": [first.transpose(1, 2)] * 2}),
        (codec.InvalidPlanes, {"planes": [first, first.float()]}),
        (codec.InvalidCodebook, {"planes": [first.half()] * 2}),
        (codec.UnsupportedDtype, {"planes": [first.float()] * 2}),
        (codec.InvalidPages, {"page_ids": source.ids[:1]}),
        (codec.InvalidPages, {"page_ids": [0, 0]}),
        (codec.InvalidPages, {"page_ids": [0, len(first)]}),
        (codec.InvalidPages, {"page_ids": [-1, 0]}),
        (codec.InvalidPages, {"num_tokens": -1}),
        (codec.InvalidPages, {"num_tokens": 33}),
        (codec.InvalidBuffer, {"out": out.to(torch.int16)}),
        (codec.InvalidBuffer, {"out": out[::2]}),
    ]
    for error, changed in wrong:
        with pytest.raises(error):
            call(**changed)


def test_flat_decode_refuses_what_does_not_fit(
    payload: torch.Tensor, codebook: codec.Codebook
) -> None:
    flat = codec.encode(torch.ones(12, dtype=torch.bfloat16), codebook)
    with pytest.raises(codec.FormatError):
        codec.decode(payload, codebook)
    with pytest.raises(codec.InvalidBuffer):
        codec.decode(flat, codebook, shape=(5, 2))
    with pytest.raises(codec.InvalidBuffer):
        codec.decode(flat, codebook, out=torch.empty(13, dtype=torch.bfloat16))
    with pytest.raises(codec.UnsupportedDtype):
        codec.decode(flat, codebook, out=torch.empty(12))
    with pytest.raises(codec.InvalidCodebook):
        codec.decode(flat, codebook, out=torch.empty(12, dtype=torch.float16))
    with pytest.raises(codec.FormatError):
        codec.decode(flat, None, out=torch.empty(12, dtype=torch.float16))
    with pytest.raises(codec.UnsupportedDtype):
        codec.encode(torch.ones(12), codebook)
