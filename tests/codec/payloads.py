"""Helpers of the codec's tests that encode, damage and decode payloads."""

import struct
import zlib

import torch

import codec
from codec.backend import Backend
from codec.errors import PayloadError
from codec.format import Layout
from codec.mix import mix64
from tests.codec.samples import Pages, bits

LISTS = ["bf16-top16-window", "fp16-top16-gaps", "e5m2-top16-window"]
"""Names of `TOP16` codebooks in `samples.BOOKS`. Their entries have no second-level codes."""
LEVELS = ["bf16-inband-window", "bf16-three_bit-gaps", "fp16-three_bit-gaps", "e4m3-three_bit-gaps"]
"""Names of codebooks in `samples.BOOKS` whose mode has second-level codes."""


def encoded(source: Pages, books: list[codec.Codebook | None]) -> torch.Tensor:
    out = torch.empty(source.bound, dtype=torch.uint8)
    written = codec.encode_pages(source.planes, books, source.ids, source.num_tokens, out)
    return out[: written.length].clone()


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
    """Return the payload with CRC and seal recomputed, so that only other checks can reject it."""
    data = bytearray(payload.numpy().tobytes())
    if len(data) >= 64:
        planes = min(struct.unpack_from("<I", data, 8)[0], (len(data) - 64) // 16)
        crc = zlib.crc32(data[:20] + data[24:40] + data[64 : 64 + 16 * planes])
        length, checksum = struct.unpack_from("<QQ", data, 40)
        struct.pack_into("<I", data, 20, crc)
        struct.pack_into("<Q", data, 56, mix64(length ^ mix64(checksum ^ crc)))
    return torch.frombuffer(data, dtype=torch.uint8)


def decode_error(
    payload: torch.Tensor,
    source: Pages,
    codebook: codec.Codebook,
    backend: Backend,
    books: list[codec.Codebook | None] | None = None,
) -> PayloadError | None:
    """Decode a payload into new pages; return its error, or None if the content is correct."""
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
