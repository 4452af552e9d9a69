"""Damaged, truncated and foreign payloads end in a typed error and leave the pages alone."""

import random
import struct
import zlib

import pytest
import torch

import codec
from codec.errors import ArgumentError, PayloadError
from codec.format import FULL, LISTED
from codec.mix import mix64
from codec.ops import Backend
from tests.codec.samples import BACKENDS, Pages, bits, make_pages

HEADER = 96
"""Bytes of the header of two planes."""
FIELDS = {
    "magic": ("<4s", 0, b"HRSX"),
    "version": ("<H", 4, 1),
    "element type": ("<B", 6, 9),
    "slot bytes": ("<B", 7, 12),
    "no slot bytes": ("<B", 7, 0),
    "larger slots": ("<B", 7, 32),
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
    "mode": ("<B", 64, 0),
    "unknown mode": ("<B", 64, 2),
    "plane reserved": ("<B", 70, 1),
    "codebook": ("<Q", 72, 1),
}


@pytest.fixture
def source() -> Pages:
    return make_pages(17, kind="mixed")


@pytest.fixture
def payload(source: Pages, codebook: codec.Codebook) -> torch.Tensor:
    out = torch.empty(source.bound, dtype=torch.uint8)
    encoded = codec.encode_pages(source.planes, [codebook] * 2, source.ids, 17, out)
    return out[: encoded.length].clone()


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


@pytest.mark.parametrize("slot_bytes", [8, 16, 32])
def test_a_flipped_bit_shows_unless_it_is_padding(slot_bytes: int) -> None:
    codebook = codec.Codebook(tuple(range(114, 130)), slot_bytes=slot_bytes)
    source = make_pages(17, num_planes=1, kv_heads=2, dim=17, kind=0.0)
    plane = source.planes[0].view(torch.int16)
    plane[source.ids[0], 0, 3, :2] = 7
    plane[source.ids[0], 1].view(-1)[::20] = 7
    plane[source.ids[1], 1, 0] = torch.arange(17, dtype=torch.int16) << 10
    out = torch.empty(source.bound, dtype=torch.uint8)
    encoded = codec.encode_pages(source.planes, [codebook], source.ids, 17, out)
    layout = codec.read_header(out[: encoded.length]).layout
    start, streams = layout.blocks[0], layout.streams
    listed, full = 3 * 14, 2 * max(0, 5 - (slot_bytes - 8) // 2)
    kinds = out[start : start + 4 * slot_bytes : slot_bytes].tolist()
    assert kinds == [2, 0, LISTED, FULL]
    words = 2 * (68 + 5)
    padding = {
        *range(start + 4 * slot_bytes, start + streams.codes),
        *range(start + streams.codes + 2 * words, start + streams.signs),
        *range(start + streams.signs + 4 * words, layout.spill),
        *range(layout.spill + listed, layout.spill + 48),
        *range(layout.spill + 48 + full, encoded.length),
    }
    for at in range(encoded.length):
        for flip in (1, 0x10, 0x80, 0xFF):
            damaged = out[: encoded.length].clone()
            damaged[at] ^= flip
            errors = [refused(damaged, source, codebook, b) for b in BACKENDS.values()]
            assert len({type(error) for error in errors}) == 1
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


@pytest.mark.parametrize("more", [8, 16, 1 << 20])
def test_a_segment_is_aligned_and_bounded(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, backend: Backend, more: int
) -> None:
    """16 bytes more might be spilled ones, which only the checksum could tell."""
    longer = torch.cat([payload, torch.zeros(more, dtype=torch.uint8)])
    longer[40:48] = torch.tensor(list(len(longer).to_bytes(8, "little")))
    error = refused(signed(longer), source, codebook, backend)
    assert error is None if more == 16 else isinstance(error, codec.FormatError)


def test_another_codebook_is_refused(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook
) -> None:
    other = codec.Codebook((*codebook.exponents[1:], 130))
    larger = codec.Codebook(codebook.exponents, slot_bytes=16)
    for books in ([other, other], [codebook, other], [codebook, None], [larger, larger]):
        with pytest.raises(codec.CodebookMismatch):
            codec.decode_pages(payload, source.planes, books, source.ids, 17)


def test_a_slot_size_that_is_not_the_codebook_s_is_refused(codebook: codec.Codebook) -> None:
    """One chunk's slot of 8 or 16 bytes leaves all else where it is."""
    payload = codec.encode(torch.ones(100, dtype=torch.bfloat16), codebook)
    payload[7] = 16
    with pytest.raises(codec.CodebookMismatch):
        codec.decode(signed(payload), codebook)


# Slots of 8 bytes hold two escapes; the first chunk has 256 words, and so lists 170 at most.
SLOTS = {
    "three in a slot": [3, 1, 0, 9, 2, 0, 9, 0],
    "no such kind": [253] + [0] * 7,
    "beyond the chunk": [1, 0, 4, 9, 0, 0, 0, 0],
    "far beyond": [1, 255, 255, 9, 0, 0, 0, 0],
    "twice": [2, 5, 0, 9, 5, 0, 9, 0],
    "descending": [2, 6, 0, 9, 5, 0, 9, 0],
    "too few listed": [LISTED, 0, 2, 0, 0, 0, 0, 0],
    "none listed": [LISTED, 0, 0, 0, 0, 0, 0, 0],
    "too many listed": [LISTED, 0, 171, 0, 0, 0, 0, 0],
    "far too many": [LISTED, 0, 255, 255, 0, 0, 0, 0],
    "a list past the end": [LISTED, 0, 3, 0, 63, 0, 0, 0],
    "a list far away": [LISTED, 0, 3, 0, 255, 255, 255, 255],
    "a list of zeros": [LISTED, 0, 3, 0, 20, 0, 0, 0],
    "full past the end": [FULL, 0, 0, 0, 1, 0, 0, 0],
    "full far away": [FULL, 0, 0, 0, 255, 255, 255, 127],
}


@pytest.mark.parametrize("name", SLOTS)
def test_slots_are_validated_before_anything_is_written(
    codebook: codec.Codebook, backend: Backend, name: str
) -> None:
    """The last chunk of the last plane is stored in full, in 64 units; all others are in order."""
    source = make_pages(16, kv_heads=2, kind=0.0)
    plane = source.planes[1].view(torch.int16)
    plane[source.ids[0], 1] = 7 << 7
    out = torch.zeros(source.bound, dtype=torch.uint8)
    encoded = codec.encode_pages(source.planes, [codebook] * 2, source.ids, 16, out)
    payload = out[: encoded.length].clone()
    layout = codec.read_header(payload).layout
    assert encoded.length == layout.spill + 512
    payload[-8:] = torch.tensor([1, 0, 9, 2, 0, 9, 3, 0])
    last = layout.blocks[1] + 8
    for start in (layout.blocks[0], last):
        damaged = payload.clone()
        damaged[start : start + 8] = torch.tensor(SLOTS[name], dtype=torch.uint8)
        error = refused(damaged, source, codebook, backend)
        assert type(error) is codec.FormatError, name


@pytest.mark.parametrize("seed", range(30))
def test_garbage_streams_behind_a_valid_header(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    garbage = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=generator)
    damaged = payload.clone()
    somewhere = int(torch.randint(HEADER, len(payload), (1,), generator=generator))
    start = HEADER if seed % 2 else somewhere
    damaged[start:] = garbage[start:]
    if seed % 3 == 0:
        damaged[HEADER : HEADER + 48] = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7] * 6)
    errors = [refused(damaged, source, codebook, backend) for backend in BACKENDS.values()]
    assert isinstance(errors[0], PayloadError)
    assert type(errors[0]) is type(errors[1])


def small_segment() -> tuple[Pages, codec.Codebook, bytes]:
    """A few hundred bytes with a chunk of every kind, and one raw plane."""
    codebook = codec.Codebook(tuple(range(114, 130)), slot_bytes=8)
    source = make_pages(5, num_planes=2, kv_heads=2, slots=4, dim=20, kind=0.0)
    plane = source.planes[0].view(torch.int16)
    plane[source.ids[0], 0].view(-1)[[3, 50]] = 9 << 7
    plane[source.ids[0], 1].view(-1)[::10] = 9 << 7
    plane[source.ids[1], 1, 0] = 9 << 7
    out = torch.empty(source.bound, dtype=torch.uint8)
    encoded = codec.encode_pages(source.planes, [codebook, None], source.ids, 5, out)
    return source, codebook, out[: encoded.length].numpy().tobytes()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few of: other bytes, bits, interesting values, moved, swapped and cut ranges."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        start, size = rng.randrange(len(damaged)), rng.choice((1, 2, 4, 8, 16, 40))
        other = rng.randrange(len(damaged))
        match rng.randrange(7):
            case 0:
                damaged[start] ^= 1 << rng.randrange(8)
            case 1:
                damaged[start : start + size] = rng.randbytes(len(damaged[start : start + size]))
            case 2:
                damaged[start] = rng.choice((0, 1, 2, 3, 4, 16, 32, 127, 253, 254, 255))
            case 3:
                damaged[start : start + size] = damaged[other : other + size]
            case 4:
                start, other = sorted((start, other))
                size = min(size, other - start, len(damaged) - other)
                first, second = damaged[start : start + size], damaged[other : other + size]
                damaged[start : start + size], damaged[other : other + size] = second, first
            case 5:
                at = HEADER + 8 * rng.randrange(4)
                kind = rng.choice((0, 1, 2, 3, LISTED, FULL))
                damaged[at : at + 4] = bytes([kind, 0, rng.randrange(40), 0])
            case 6 if rng.random() < 0.2:
                del damaged[rng.randrange(1, len(damaged)) :]
    return bytes(damaged)


@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_mutations_end_in_an_error_or_the_content(seed: int) -> None:
    """10,000 for each seed; every 50th meets the reference too, which agrees."""
    source, codebook, data = small_segment()
    rng, met = random.Random(seed), set()
    for number in range(10_000):
        damaged = torch.frombuffer(bytearray(mutated(data, rng)), dtype=torch.uint8)
        if rng.random() < 0.7:
            damaged = signed(damaged)
        error = refused(damaged, source, codebook, BACKENDS["cpu"], [codebook, None])
        met.add(type(error))
        if number % 50 == 0:
            same = refused(damaged, source, codebook, BACKENDS["reference"], [codebook, None])
            assert type(same) is type(error)
    assert met >= {
        type(None), codec.FormatError, codec.TruncatedPayload, codec.CodebookMismatch,
        codec.ChecksumMismatch,
    }  # fmt: skip


def test_garbage_of_any_length(source: Pages, codebook: codec.Codebook) -> None:
    generator = torch.Generator().manual_seed(0)
    for length in [*range(200), 4096]:
        garbage = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        for start in (b"", b"HRSZ", b"HRSZ\x02\x00\x01\x08"):
            head = torch.tensor(list(start[:length]), dtype=torch.uint8)
            damaged = torch.cat([head, garbage[len(head) :]])
            error = refused(damaged, source, codebook, BACKENDS["cpu"])
            assert isinstance(error, codec.FormatError)
            with pytest.raises(codec.FormatError):
                codec.decode(damaged, codebook)


@pytest.mark.parametrize("coded", [True, False])
def test_swapped_planes_show(codebook: codec.Codebook, backend: Backend, coded: bool) -> None:
    """Every byte is valid, only the checksum knows."""
    source = make_pages(16, kind=0.001)
    books = [codebook if coded else None] * 2
    out = torch.empty(source.bound, dtype=torch.uint8)
    encoded = codec.encode_pages(source.planes, books, source.ids, 16, out)
    blocks = out[HEADER : encoded.length].view(2, -1)
    swapped = torch.cat([out[:HEADER], blocks.flip(0).reshape(-1)])
    error = refused(swapped, source, codebook, backend)
    assert isinstance(error, codec.ChecksumMismatch)


def test_swapped_chunks_show(codebook: codec.Codebook, backend: Backend) -> None:
    source = make_pages(16, num_planes=1, kind=0.001)
    out = torch.empty(source.bound, dtype=torch.uint8)
    encoded = codec.encode_pages(source.planes, [codebook], source.ids, 16, out)
    payload = out[: encoded.length].clone()
    layout = codec.read_header(payload).layout
    streams, sizes = layout.streams, (8, 512, 1024)
    for start, size in zip((streams.slots, streams.codes, streams.signs), sizes, strict=True):
        parts = payload[layout.blocks[0] + start :][: 3 * size].view(3, size)
        parts[:2] = parts[:2].flip(0).clone()
    error = refused(payload, source, codebook, backend)
    assert isinstance(error, codec.ChecksumMismatch)


def test_a_small_output_is_refused_before_it_is_written(
    source: Pages, codebook: codec.Codebook, backend: Backend
) -> None:
    out = torch.full((source.bound_with(8) - 1,), 0xA5, dtype=torch.uint8)
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
    wrong: list[tuple[type[ArgumentError], dict[str, object]]] = [
        (codec.InvalidPlanes, {"planes": []}),
        (codec.InvalidPlanes, {"codebooks": books[:1]}),
        (codec.InvalidPlanes, {"planes": [first, first[:2]]}),
        (codec.InvalidPlanes, {"planes": [first[0], first[0]]}),
        (codec.InvalidPlanes, {"planes": [first[..., ::2], first[..., ::2]]}),
        (codec.InvalidPlanes, {"planes": [first.transpose(1, 2)] * 2}),
        (codec.UnsupportedDtype, {"planes": [first.half()] * 2}),
        (codec.UnsupportedDtype, {"planes": [first, first.float()]}),
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
    with pytest.raises(codec.UnsupportedDtype):
        codec.encode(torch.ones(12), codebook)
