"""Many segments in one call of `PagedCodec`, and decoding without a parsed header."""

import pytest
import torch

import codec
from codec.gpu.paged import PagedCodec
from tests.codec.batches import Batch, Factory
from tests.codec.payloads import signed
from tests.codec.samples import BOOKS

BOOK = BOOKS["bf16-top16-window"]
KERNELS = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(
    params=["cpu", pytest.param("kernels", marks=[pytest.mark.triton, pytest.mark.long])]
)
def factory(request: pytest.FixtureRequest) -> Factory:
    """Constructor of the codec of the CPU, or of the one that launches kernels."""
    return codec.paged if request.param == "cpu" else PagedCodec


@pytest.fixture
def device(factory: Factory) -> torch.device:
    return KERNELS if factory is PagedCodec else torch.device("cpu")


@pytest.fixture
def batch(device: torch.device) -> Batch:
    return Batch.of([BOOK, None], 0.02, device, raw=(1,))


@pytest.mark.parametrize(
    "name", ["bf16-top16-gaps", "bf16-three_bit-window", "fp16-inband-gaps", "e4m3-three_bit-gaps"]
)
def test_batch_writes_and_reads_the_reference_bytes(
    name: str, factory: Factory, device: torch.device
) -> None:
    batch = Batch.of([BOOKS[name], None, BOOKS[name]], 0.03, device)
    batch.encoded_by(factory)
    assert not batch.decoded_by(factory)


def test_batch_of_raw_integer_planes(factory: Factory, device: torch.device) -> None:
    batch = Batch.of([None, None], "random", device, (17, 3), (0, 1), torch.int32, 5)
    batch.encoded_by(factory)
    assert not batch.decoded_by(factory)


def test_batch_mixes_raw_and_coded_segments(batch: Batch, factory: Factory) -> None:
    assert not batch.decoded_by(factory)
    assert factory(batch.planes(), batch.books).encode_batch([], batch.buffer) == []
    assert factory(batch.planes(), batch.books).decode_batch([], batch.buffer) == []


@pytest.mark.parametrize("part", ["codes", "raw", "entries", "starts"])
def test_damaged_segment_fails_alone(part: str, batch: Batch, factory: Factory) -> None:
    number = 1 if part == "raw" else 3
    segment, layout = batch.segments[number], codec.read_header(batch.payloads[number]).layout
    offset = {"starts": layout.starts + 5, "entries": layout.entries}
    batch.buffer[segment.offset + offset.get(part, layout.blocks[0].streams[0] + 3)] ^= 0x11
    errors = batch.decoded_by(factory)
    assert list(errors) == [number]
    assert isinstance(errors[number], (codec.ChecksumMismatch, codec.FormatError))


def _header(batch: Batch, at: int, value: int, *, resign: bool = True) -> torch.Tensor:
    """Change a byte of the header of segment 0 in the buffer."""
    segment = batch.segments[0]
    payload = batch.payloads[0].clone()
    payload[at] = value
    payload = signed(payload) if resign else payload
    batch.buffer[segment.offset : segment.offset + segment.length] = payload.to(batch.device)
    return payload


@pytest.mark.parametrize(
    ("at", "value", "resign", "error"),
    [
        (0, 0, True, codec.FormatError),  # magic number
        (4, 2, True, codec.FormatError),  # version
        (8, 3, True, codec.FormatError),  # number of planes
        (24, 18, True, codec.FormatError),  # tokens
        (41, 0xFF, True, codec.TruncatedPayload),  # length
        (48, 1, False, codec.FormatError),  # checksum that does not match the seal
        (48, 1, True, codec.ChecksumMismatch),  # checksum of another segment
        (72, 1, True, codec.CodebookMismatch),
        (64, 0, True, codec.FormatError),  # a plane with codes is marked as raw
    ],
)
def test_header_on_the_device_is_verified(
    batch: Batch,
    factory: Factory,
    at: int,
    value: int,
    resign: bool,
    error: type[codec.PayloadError],
) -> None:
    if int(batch.payloads[0][at]) == value:
        value ^= 1
    _header(batch, at, value, resign=resign)
    errors = batch.decoded_by(factory)
    assert list(errors) == [0]
    assert type(errors[0]) is error


def test_segment_that_is_not_the_expected_one_is_rejected(batch: Batch, factory: Factory) -> None:
    """Checksum, number of tokens, mode and length may differ from what the header states."""
    first, second, third, fourth, last = batch.segments
    wrong = [
        first._replace(checksum=first.checksum ^ 1),
        second._replace(raw=False),
        third._replace(num_tokens=2),
        fourth._replace(length=fourth.length - 16),
        last,
    ]
    batch.segments[:] = wrong
    errors = batch.decoded_by(factory)
    assert list(errors) == [0, 1, 2, 3]
    assert isinstance(errors[0], codec.ChecksumMismatch)
    for number in (1, 2, 3):
        assert isinstance(errors[number], codec.FormatError)


@pytest.mark.parametrize("length", [0, 16, 80, 1 << 14])
def test_impossible_length_fails_alone(batch: Batch, factory: Factory, length: int) -> None:
    first = batch.segments[0]
    batch.segments[0] = first._replace(length=length, offset=112)
    errors = batch.decoded_by(factory)
    assert list(errors) == [0]
    assert isinstance(errors[0], codec.FormatError)


def test_invalid_arguments_of_a_batch_raise_typed_errors(batch: Batch, factory: Factory) -> None:
    coder = factory(batch.planes(), batch.books)
    size = len(batch.buffer)
    segment, bound = batch.segments[0], batch.source.bound
    source = codec.EncodeSegment(segment.page_ids, segment.num_tokens, 0, bound)
    buffer = torch.zeros(bound, dtype=torch.uint8, device=batch.device)
    for error, changed in [
        (codec.InvalidBuffer, source._replace(offset=-16)),
        (codec.InvalidBuffer, source._replace(offset=16)),
        (codec.BufferTooSmall, source._replace(capacity=64)),
        (codec.InvalidPages, source._replace(num_tokens=33)),
        (codec.InvalidPages, source._replace(page_ids=[0, 0])),
    ]:
        with pytest.raises(error):
            coder.encode_batch([changed], buffer)
    for prefix_bytes in (4, 136, 120, -8):
        with pytest.raises(codec.InvalidBuffer):
            coder.decode_batch([segment], batch.buffer, prefix_bytes=prefix_bytes)
    for offset in (-16, size - segment.length + 16):
        with pytest.raises(codec.InvalidBuffer):
            coder.decode_batch([segment._replace(offset=offset)], batch.buffer)
    with pytest.raises(codec.InvalidPages):
        coder.decode_batch([segment._replace(page_ids=[0])], batch.buffer)
