"""Damaged, truncated and foreign payloads end in a typed error and leave the pages alone."""

import struct
import zlib

import pytest
import torch

import codec
from codec.errors import ArgumentError, PayloadError
from codec.ops import Backend
from tests.codec.samples import BACKENDS, Pages, bits, make_pages

CRC_AT = 60
FIELDS = {
    "magic": ("<4s", 0, b"HRSX"),
    "version": ("<H", 4, 2),
    "element type": ("<B", 6, 9),
    "reserved": ("<B", 7, 1),
    "chunk": ("<I", 8, 512),
    "planes": ("<I", 12, 1),
    "no planes": ("<I", 12, 0),
    "many planes": ("<I", 12, 2**32 - 1),
    "heads": ("<I", 16, 2),
    "no heads": ("<I", 16, 0),
    "dim": ("<I", 20, 32),
    "tokens": ("<Q", 24, 18),
    "no tokens": ("<Q", 24, 0),
    "many tokens": ("<Q", 24, 2**64 - 1),
    "slots": ("<Q", 32, 8),
    "no slots": ("<Q", 32, 0),
    "shorter": ("<Q", 40, 4096),
    "longer": ("<Q", 40, 2**40),
    "checksum": ("<Q", 48, 1),
    "reserved word": ("<I", 56, 1),
    "mode": ("<B", 64, 0),
    "unknown mode": ("<B", 64, 2),
    "plane reserved": ("<B", 70, 1),
    "codebook": ("<Q", 72, 1),
    "offset": ("<Q", 80, 144),
    "far offset": ("<Q", 80, 2**63),
    "block length": ("<Q", 88, 5000),
    "long block": ("<Q", 88, 2**62),
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
    """The payload with a header CRC that matches: what a buggy sender might emit."""
    data = bytearray(payload.numpy().tobytes())
    planes = min(struct.unpack_from("<I", data, 12)[0], (len(data) - 64) // 32)
    crc = zlib.crc32(data[64 : 64 + 32 * planes], zlib.crc32(data[:CRC_AT]))
    struct.pack_into("<I", data, CRC_AT, crc)
    return torch.frombuffer(data, dtype=torch.uint8)


def refused(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, backend: Backend
) -> PayloadError | None:
    """The error that the payload meets, after a look at the pages; `None` if it decodes."""
    target = source.empty_like()
    before = [bits(plane).clone() for plane in target.planes]
    books = [codebook] * len(target.planes)
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


def test_a_flipped_bit_shows_or_changes_nothing(codebook: codec.Codebook) -> None:
    source = make_pages(17, num_planes=1, kv_heads=2, dim=16, kind="normal")
    plane = source.planes[0].view(torch.int16)
    plane[source.ids[0], 0, 3, :5] = 7
    plane[source.ids[1], 1, 0] = torch.arange(16, dtype=torch.int16) << 10
    out = torch.empty(source.bound, dtype=torch.uint8)
    encoded = codec.encode_pages(source.planes, [codebook], source.ids, 17, out)
    assert codec.read_header(out[: encoded.length]).planes[0].mode == 1
    unnoticed = 0
    for at in range(encoded.length):
        for flip in (1, 0x10, 0x80, 0xFF):
            damaged = out[: encoded.length].clone()
            damaged[at] ^= flip
            errors = [refused(damaged, source, codebook, b) for b in BACKENDS.values()]
            assert len({type(error) for error in errors}) == 1
            unnoticed += errors[0] is None
    assert unnoticed < 4 * 0.1 * encoded.length, "only padding and escaped codes may go unnoticed"


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


def test_another_codebook_is_refused(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook
) -> None:
    other = codec.Codebook((*codebook.exponents[1:], 130))
    for books in ([other, other], [codebook, other], [codebook, None]):
        with pytest.raises(codec.CodebookMismatch):
            codec.decode_pages(payload, source.planes, books, source.ids, 17)


@pytest.mark.parametrize("seed", range(30))
def test_garbage_streams_behind_a_valid_header(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    garbage = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=generator)
    damaged = payload.clone()
    start = 128 if seed % 2 else int(torch.randint(128, len(payload), (1,), generator=generator))
    damaged[start:] = garbage[start:]
    if seed % 3 == 0:
        damaged[128:140] = torch.tensor([9, 0] * 6, dtype=torch.uint8)
    errors = [refused(damaged, source, codebook, backend) for backend in BACKENDS.values()]
    assert isinstance(errors[0], PayloadError)
    assert type(errors[0]) is type(errors[1])


def test_garbage_of_any_length(source: Pages, codebook: codec.Codebook) -> None:
    generator = torch.Generator().manual_seed(0)
    for length in [*range(200), 4096]:
        garbage = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        for start in (b"", b"HRSZ", b"HRSZ\x01\x00\x01\x00"):
            head = torch.tensor(list(start[:length]), dtype=torch.uint8)
            damaged = torch.cat([head, garbage[len(head) :]])
            error = refused(damaged, source, codebook, BACKENDS["cpu"])
            assert isinstance(error, codec.FormatError)
            with pytest.raises(codec.FormatError):
                codec.decode(damaged, codebook)


def test_swapped_chunks_and_planes_show(codebook: codec.Codebook) -> None:
    """Two raw blocks change places: every byte is valid, only the checksum knows."""
    source = make_pages(16, kind="random")
    out = torch.empty(source.bound, dtype=torch.uint8)
    encoded = codec.encode_pages(source.planes, [None] * 2, source.ids, 16, out)
    block = (encoded.length - 128) // 2
    halves = out[128 : encoded.length].view(2, block)
    swapped = torch.cat([out[:128], halves.flip(0).reshape(-1)])
    error = refused(swapped, source, codebook, BACKENDS["cpu"])
    assert isinstance(error, codec.ChecksumMismatch)


def test_a_small_output_is_refused_before_it_is_written(
    source: Pages, codebook: codec.Codebook, backend: Backend
) -> None:
    out = torch.full((source.bound - 1,), 0xA5, dtype=torch.uint8)
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
