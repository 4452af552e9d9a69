"""Invalid, truncated and mismatching headers are rejected before anything is written."""

import struct

import pytest
import torch

import codec
from codec.backend import Backend
from codec.errors import PayloadError
from codec.format import Geometry, Layout, Mode
from tests.codec.payloads import decode_error, signed
from tests.codec.samples import BACKENDS, BOOKS, Pages

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
    error = decode_error(signed(damaged) if resigned else damaged, source, codebook, backend)
    expected: type[PayloadError] = codec.FormatError
    if resigned and name == "checksum":
        expected = codec.ChecksumMismatch
    if resigned and name == "codebook":
        expected = codec.CodebookMismatch
    assert isinstance(error, expected), error


@pytest.mark.parametrize("field", ["CRC", "seal"])
def test_header_with_wrong_crc_or_seal_is_rejected(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, backend: Backend, field: str
) -> None:
    payload[20 if field == "CRC" else 56] ^= 1
    assert isinstance(decode_error(payload, source, codebook, backend), codec.FormatError)


@pytest.mark.parametrize("mode", [1, 2])
def test_unsupported_mode_of_the_element_type_is_rejected(mode: int) -> None:
    book = BOOKS["e4m3-three_bit-window"]
    payload = codec.encode(torch.ones(5, dtype=book.dtype), book)
    payload[64] = mode
    with pytest.raises(codec.FormatError, match="does not support mode"):
        codec.decode(signed(payload), book, (5,))


def test_every_truncation_raises_truncated_payload(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook
) -> None:
    for length in range(0, len(payload), 7):
        error = decode_error(payload[:length].clone(), source, codebook, BACKENDS["cpu"])
        assert isinstance(error, codec.TruncatedPayload), length
    for length in range(len(payload)):
        with pytest.raises(codec.TruncatedPayload):
            codec.read_header(payload[:length])
    longer = torch.cat([payload, payload[:1]])
    assert isinstance(decode_error(longer, source, codebook, BACKENDS["cpu"]), codec.FormatError)


@pytest.mark.parametrize("more", [-16, 8, 16, 1 << 20])
def test_length_must_match_the_entries(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook, backend: Backend, more: int
) -> None:
    longer = torch.cat([payload, torch.zeros(max(more, 0), dtype=torch.uint8)])
    longer = longer[: len(payload) + more].clone()
    longer[40:48] = torch.tensor(list(len(longer).to_bytes(8, "little")))
    assert isinstance(decode_error(signed(longer), source, codebook, backend), codec.FormatError)


def test_other_codebook_raises_codebook_mismatch(
    payload: torch.Tensor, source: Pages, codebook: codec.Codebook
) -> None:
    other = codec.Codebook((*codebook.exponents[1:], 130))
    another_mode = codec.Codebook(codebook.exponents[:15], Mode.INBAND)
    for books in ([other, other], [codebook, other], [codebook, None], [another_mode] * 2):
        with pytest.raises(codec.CodebookMismatch):
            codec.decode_pages(payload, source.planes, books, source.ids, 17)


@pytest.mark.parametrize("planes", [1, 3, 64])
@pytest.mark.parametrize("tokens", [0, 1, 17, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_largest_segment_is_the_largest_bound_of_all_modes(
    planes: int, tokens: int, dtype: torch.dtype
) -> None:
    element = codec.element_of(dtype)
    geometry = Geometry(2, 24 * element.units, tokens, 16)
    bounds = [
        Layout.of(geometry, element, [mode] * planes).bound
        for mode in Mode
        if mode.supports(element)
    ]
    assert codec.max_segment_bytes(planes, 2, 24, tokens, 16, element) == max(bounds)
