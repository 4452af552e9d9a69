"""Frame headers: round trip, verification and damaged input."""

import dataclasses
import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import prefill_pb2 as pb
from services.transfer.errors import CorruptFrame, ForeignSegment, FrameError, StaleSegment
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES, FrameHeader, verify

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    FrameHeader,
    epoch=st.binary(min_size=16, max_size=16),
    request=st.binary(min_size=16, max_size=16),
    attempt=u32,
    index=u32,
    extent=st.builds(Extent, *(u32 for _ in dataclasses.fields(Extent))),
    generation=u64,
)
EXTENT = [field.name for field in dataclasses.fields(Extent)]
FIELDS = ["epoch", "request", "attempt", "index", "generation", *EXTENT]
STALE = {"epoch", "generation", "attempt"}


def packed(header: FrameHeader, room: int = HEADER_BYTES) -> torch.Tensor:
    buffer = torch.full((room,), 0xA5, dtype=torch.uint8)
    header.pack_into(buffer)
    return buffer


def bytes_of(buffer: torch.Tensor) -> bytes:
    return bytes(buffer.numpy())


@given(headers)
def test_header_round_trip(header: FrameHeader) -> None:
    buffer = packed(header, HEADER_BYTES + 17)
    assert FrameHeader.unpack(bytes_of(buffer)) == header
    assert (buffer[HEADER_BYTES:] == 0xA5).all()
    verify(header, FrameHeader.unpack(bytes_of(buffer)))


@given(headers, st.integers(0, 8 * HEADER_BYTES - 1))
def test_flipped_bit_is_detected(header: FrameHeader, bit: int) -> None:
    buffer = packed(header)
    buffer[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(CorruptFrame):
        FrameHeader.unpack(bytes_of(buffer))


@given(st.binary(max_size=3 * HEADER_BYTES))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(CorruptFrame):
        FrameHeader.unpack(noise)


def with_field(header: FrameHeader, other: FrameHeader, name: str) -> FrameHeader:
    """Return the header with one field of another header, or of its extent."""
    if name in EXTENT:
        value = getattr(other.extent, name)
        return dataclasses.replace(
            header, extent=dataclasses.replace(header.extent, **{name: value})
        )
    return dataclasses.replace(header, **{name: getattr(other, name)})


@given(headers, headers, st.sampled_from(FIELDS))
def test_error_names_the_differing_field(
    header: FrameHeader, other: FrameHeader, name: str
) -> None:
    found = with_field(header, other, name)
    if found == header:
        verify(header, found)
        return
    error = StaleSegment if name in STALE else ForeignSegment
    with pytest.raises(error, match=f"^{name} is"):
        verify(header, found)


@given(headers, headers)
def test_stale_field_is_reported_before_other_differences(
    header: FrameHeader, other: FrameHeader
) -> None:
    if any(getattr(header, name) != getattr(other, name) for name in STALE):
        with pytest.raises(StaleSegment):
            verify(header, other)


def describe(epoch: str = "00112233445566778899aabbccddeeff") -> FrameHeader:
    segment = pb.Segment(
        index=2,
        first_token=48,
        num_tokens=17,
        first_layer=6,
        num_layers=3,
        first_kv_head=4,
        num_kv_heads=2,
        plane_group=1,
        rank=5,
        generation=9,
    )
    return FrameHeader.of(segment, epoch=epoch, request_id="req-ü", attempt=1)


def test_header_has_the_documented_bytes() -> None:
    raw = bytes_of(packed(describe()))
    assert raw[:8] == b"HRKV\x05\x00\x60\x00"
    assert raw[12:16] == (1).to_bytes(4, "little")
    assert raw[16:32] == bytes.fromhex("00112233445566778899aabbccddeeff")
    assert raw[32:48] == hashlib.sha256("req-ü".encode()).digest()[:16]
    numbers = [int.from_bytes(raw[at : at + 4], "little") for at in range(48, 88, 4)]
    assert numbers == [2, 48, 17, 6, 3, 4, 2, 1, 5, 0]
    assert raw[88:96] == (9).to_bytes(8, "little")


@pytest.mark.parametrize("epoch", ["", "00", "zz" * 16, "00" * 17])
def test_malformed_epoch_is_refused(epoch: str) -> None:
    with pytest.raises(FrameError):
        describe(epoch=epoch)
