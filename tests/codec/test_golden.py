"""Golden vectors: bytes that this and every later codec of wire version 1 writes and reads.

Content is a function of the element's number, so that another implementation can make it too.
A vector changes only together with `WIRE_VERSION`.
"""

import hashlib
import struct
from pathlib import Path

import pytest
import torch

import codec
from codec.checksum import mix64
from codec.format import RAW_CHUNK
from codec.ops import Backend
from tests.codec.samples import BACKENDS, bits, from_bits

BOOK = codec.Codebook(tuple(range(114, 130)))
GOLDEN = Path(__file__).parent / "golden"
CHECKSUMS = {
    "flat": 0xBAD9F660DD830A64,
    "paged": 0xF0A92951C3138118,
    "raw": 0xF0A92951C3138118,
}
LARGE_SHA256 = "971167e4ec9305ee5930294845f6d06f01a00adcf20939361e201dc6a1b57a0e"


def content(elements: int) -> torch.Tensor:
    """Element i: mantissa and sign from i * 37, exponent 114 + i * i mod 16, every 29th 3 * i."""
    i = torch.arange(elements)
    exponent = torch.where(i % 29 == 28, 3 * i & 0xFF, 114 + (i * i & 0xF))
    return from_bits((i * 37 & 0x80) << 8 | exponent << 7 | (i * 37 & 0x7F))


def planes() -> list[torch.Tensor]:
    """Two planes of 3 pages, 2 heads, 16 slots, 8 dims; the second has one head of zeros."""
    first = content(3 * 2 * 16 * 8).view(3, 2, 16, 8)
    second = first.flip(0).clone()
    second[1, 0] = 0
    return [first, second]


def vector(name: str) -> tuple[list[torch.Tensor], list[codec.Codebook | None], list[int], int]:
    """Planes, codebooks, page ids and tokens of a vector."""
    if name == "flat":
        return [content(321).view(1, 1, 321, 1)], [BOOK], [0], 321
    return planes(), [None if name == "raw" else BOOK] * 2, [2, 1], 19


@pytest.mark.parametrize("name", CHECKSUMS)
def test_golden_vectors_are_written_and_read(name: str, backend: Backend) -> None:
    tensors, books, pages, tokens = vector(name)
    _, heads, _, dim = tensors[0].shape
    out = torch.empty(codec.max_segment_bytes(len(tensors), heads, dim, tokens), dtype=torch.uint8)
    encoded = codec.encode_pages(tensors, books, pages, tokens, out, backend=backend)
    golden = bytes.fromhex((GOLDEN / f"{name}.hex").read_text())
    assert out[: encoded.length].numpy().tobytes() == golden
    assert encoded.checksum == CHECKSUMS[name]

    payload = torch.frombuffer(bytearray(golden), dtype=torch.uint8)
    targets = [torch.zeros_like(plane) for plane in tensors]
    codec.decode_pages(payload, targets, books, pages, tokens, backend=backend)
    for plane, target in zip(tensors, targets, strict=True):
        tokens_of = [
            bits(t[pages]).transpose(0, 1).reshape(heads, -1, dim) for t in (plane, target)
        ]
        assert torch.equal(tokens_of[0][:, :tokens], tokens_of[1][:, :tokens])


def test_a_large_payload_has_its_hash() -> None:
    payload = codec.encode(content(100_003), BOOK)
    assert hashlib.sha256(payload.numpy().tobytes()).hexdigest() == LARGE_SHA256


def test_the_vectors_cover_escapes_full_and_short_chunks() -> None:
    header = codec.read_header(
        torch.frombuffer(bytearray.fromhex((GOLDEN / "paged.hex").read_text()), dtype=torch.uint8)
    )
    assert [plane.mode for plane in header.planes] == [1, 1]
    assert header.geometry.chunk_lengths() == [128, 24, 128, 24]
    data = bytes.fromhex((GOLDEN / "paged.hex").read_text())
    start = header.planes[1].offset
    assert struct.unpack_from("<4H", data, start) == (4, RAW_CHUNK, 4, 1)


@pytest.mark.parametrize("elements", [1, 3, 4, 5, 1024, 1025, 2500])
def test_the_checksum_is_its_definition(elements: int) -> None:
    """In plain Python, from the text of `codec/checksum.py` alone."""
    patterns = [p & 0xFFFF for p in bits(content(elements)).tolist()]
    total = 0
    for number, start in enumerate(range(0, elements, 1024)):
        chunk = patterns[start : start + 1024]
        padded = chunk + [0] * (-len(chunk) % 4)
        digest = 0
        for word in range(len(padded) // 4):
            e = padded[4 * word : 4 * word + 4]
            key = mix64((word + 1) * 0x9E3779B97F4A7C15 % 2**64)
            a = (e[0] + (e[1] << 16) + key) % 2**32
            b = (e[2] + (e[3] << 16) + (key >> 32)) % 2**32
            digest += (a + 1) * (b + 1) - 1
        total += mix64((digest + mix64(number << 11 | len(chunk))) % 2**64)
    tensor = content(elements).view(1, 1, elements, 1)
    for backend in BACKENDS.values():
        assert codec.checksum_pages([tensor], [0], elements, backend=backend) == total % 2**64


def test_mix64_is_splitmix64() -> None:
    """First outputs of SplitMix64 from seed 0, as its authors publish them."""
    golden = 0x9E3779B97F4A7C15
    assert mix64(golden) == 0xE220A8397B1DCDAF
    assert mix64(2 * golden % 2**64) == 0x6E789E6AA1B965F4
