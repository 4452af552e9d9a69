"""Golden vectors: bytes that this and every later codec of wire version 2 writes and reads.

Content is a function of the element's number, so that another implementation can make it too.
A vector changes only together with `WIRE_VERSION`.
"""

import hashlib
from pathlib import Path

import pytest
import torch

import codec
from codec.format import FULL, LISTED
from codec.mix import mix64
from codec.ops import Backend
from tests.codec.plain import Segment, raw_digest, term
from tests.codec.samples import BACKENDS, bits, from_bits

EXPONENTS = tuple(range(114, 130))
GOLDEN = Path(__file__).parent / "golden"
CHECKSUMS = {
    "flat": 0xF5005D53954F166B,
    "list": 0x36FD08BB11A1D2B0,
    "full": 0xE6A7ADFCDFC6F8B7,
    "paged": 0x3866C684AB7A870B,
    "slot16": 0x504A49F928694605,
    "slot32": 0xBAC3F4377B49D761,
    "raw": 0xF0A92951C3138118,
}
LARGE_SHA256 = "444884fcb82f5e55ec492dae5de3d760e7257f39f95e1f79a1bb2dbfb387c55b"
KINDS = {
    "flat": [[2]],
    "list": [[LISTED]],
    "full": [[FULL]],
    "paged": [[LISTED, 1, LISTED, 1], [LISTED, FULL, LISTED, 1]],
    "slot16": [[3, 1, 3, 1], [4, FULL, 4, 1]],
    "slot32": [[3, 1, 3, 1], [4, FULL, 4, 1]],
    "raw": [[], []],
}
"""The first byte of each plane's slots."""


def content(elements: int) -> torch.Tensor:
    """Element i: mantissa and sign from i * 37, exponent 114 + i * i mod 16, every 29th 3 * i."""
    i = torch.arange(elements)
    exponent = torch.where(i % 29 == 28, 3 * i & 0xFF, 114 + (i * i & 0xF))
    return from_bits((i * 37 & 0x80) << 8 | exponent << 7 | (i * 37 & 0x7F))


def bits_of_all(elements: int) -> torch.Tensor:
    """Element i: sign, exponent and mantissa from i * 2,687."""
    return from_bits(torch.arange(elements) * 2687 & 0xFFFF)


def planes() -> list[torch.Tensor]:
    """Two planes of 3 pages, 2 heads, 16 slots, 8 dims; the second has one head of zeros."""
    first = content(3 * 2 * 16 * 8).view(3, 2, 16, 8)
    second = first.flip(0).clone()
    second[1, 0] = 0
    return [first, second]


def vector(name: str) -> tuple[list[torch.Tensor], list[codec.Codebook | None], list[int], int]:
    """Planes, codebooks, page ids and tokens of a vector."""
    book = codec.Codebook(EXPONENTS, slot_bytes={"slot16": 16, "slot32": 32}.get(name, 8))
    flat = {"flat": content(77), "list": content(321), "full": bits_of_all(98)}.get(name)
    if flat is not None:
        return [flat.view(1, 1, len(flat), 1)], [book], [0], len(flat)
    return planes(), [None if name == "raw" else book] * 2, [2, 1], 19


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


@pytest.mark.parametrize("name", CHECKSUMS)
def test_golden_vectors_are_written_and_read(name: str, backend: Backend) -> None:
    tensors, books, pages, tokens = vector(name)
    _, heads, slots, dim = tensors[0].shape
    bound = codec.max_segment_bytes(len(tensors), heads, dim, tokens, slots)
    out = torch.empty(bound, dtype=torch.uint8)
    encoded = codec.encode_pages(tensors, books, pages, tokens, out, backend=backend)
    assert out[: encoded.length].numpy().tobytes() == golden(name)
    assert encoded.checksum == CHECKSUMS[name]

    payload = torch.frombuffer(bytearray(golden(name)), dtype=torch.uint8)
    targets = [torch.zeros_like(plane) for plane in tensors]
    codec.decode_pages(payload, targets, books, pages, tokens, backend=backend)
    for plane, target in zip(tensors, targets, strict=True):
        assert torch.equal(valid(target, pages, tokens), valid(plane, pages, tokens))


def valid(plane: torch.Tensor, pages: list[int], tokens: int) -> torch.Tensor:
    """The patterns of the valid slots, `[kv_head, token, dim]`."""
    _, heads, _, dim = plane.shape
    return bits(plane[pages]).transpose(0, 1).reshape(heads, -1, dim)[:, :tokens]


@pytest.mark.parametrize("name", CHECKSUMS)
def test_a_decoder_written_from_the_text_agrees(name: str) -> None:
    tensors, _, pages, tokens = vector(name)
    segment = Segment(golden(name), list(EXPONENTS))
    assert segment.kinds == KINDS[name]
    assert segment.checksum % 2**64 == CHECKSUMS[name]
    for plane, elements in zip(tensors, segment.planes, strict=True):
        assert [e & 0xFFFF for e in valid(plane, pages, tokens).flatten().tolist()] == elements


def test_a_large_payload_has_its_hash() -> None:
    payload = codec.encode(content(100_003), codec.Codebook(EXPONENTS))
    assert hashlib.sha256(payload.numpy().tobytes()).hexdigest() == LARGE_SHA256
    Segment(payload.numpy().tobytes(), list(EXPONENTS))


@pytest.mark.parametrize("elements", [1, 3, 4, 5, 1024, 1025, 2500])
def test_the_checksum_of_content_is_its_definition(elements: int) -> None:
    patterns = [p & 0xFFFF for p in bits(content(elements)).tolist()]
    total = 0
    for number, start in enumerate(range(0, elements, 1024)):
        chunk = patterns[start : start + 1024]
        total += term(raw_digest(chunk + [0] * (-len(chunk) % 4)), number, len(chunk))
    tensor = content(elements).view(1, 1, elements, 1)
    for backend in BACKENDS.values():
        assert codec.checksum_pages([tensor], [0], elements, backend=backend) == total % 2**64


def test_mix64_is_splitmix64() -> None:
    """First outputs of SplitMix64 from seed 0, as its authors publish them."""
    golden = 0x9E3779B97F4A7C15
    assert mix64(golden) == 0xE220A8397B1DCDAF
    assert mix64(2 * golden % 2**64) == 0x6E789E6AA1B965F4
