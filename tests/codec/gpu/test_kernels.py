"""Compare the Triton backend with the reference, on a GPU or under Triton's interpreter."""

import pytest
import torch

import codec
from codec.backend import Backend
from codec.codebook import Codebook
from codec.elements import BY_NAME, INTEGER_TYPES
from codec.gpu import backend as gpu
from codec.gpu import launch
from codec.gpu.paged import PagedCodec
from codec.reference import backend as reference
from tests.codec.samples import BOOKS, Pages, bits, from_bits, make_pages

pytestmark = [pytest.mark.triton, pytest.mark.long]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [
    # tokens, slots, dim, kind
    (1, 16, 64, "normal"),
    (17, 16, 64, "mixed"),
    (40, 16, 128, 0.004),
    (20, 16, 80, 0.05),
    (9, 4, 37, "random"),
]
CASES = [(name, *SHAPES[number % len(SHAPES)]) for number, name in enumerate(sorted(BOOKS))]
if DEVICE.type == "cpu":  # each takes about ten seconds in Triton's interpreter
    CASES = CASES[::2]
CASES += [("bf16-three_bit-window", 48, 16, 64, 0.3), ("bf16-top16-window", 0, 16, 64, "normal")]


def on_device(pages: Pages) -> Pages:
    planes = [plane.to(DEVICE) for plane in pages.planes]
    return Pages(planes, pages.ids, pages.num_tokens, pages.generator)


def encode(
    pages: Pages, backend: Backend, books: list[Codebook | None]
) -> tuple[codec.Encoded, torch.Tensor]:
    out = torch.full((pages.bound,), 0xA5, dtype=torch.uint8, device=pages.planes[0].device)
    encoded = codec.encode_pages(
        pages.planes, books, pages.ids, pages.num_tokens, out, backend=backend
    )
    return encoded, out[: encoded.length].clone()


def check(source: Pages, books: list[Codebook | None]) -> None:
    """Check that the GPU backend and the reference agree on bytes, elements and checksums."""
    tokens = source.num_tokens
    expected, payload = encode(source, reference, books)
    here = on_device(source)
    encoded, written = encode(here, gpu, books)
    assert encoded == expected
    assert torch.equal(written.cpu(), payload)
    target = on_device(source.empty_like())
    codec.decode_pages(payload.to(DEVICE), target.planes, books, target.ids, tokens, backend=gpu)
    back = Pages([plane.cpu() for plane in target.planes], target.ids, tokens, source.generator)
    assert torch.equal(back.content(), source.content())
    assert codec.checksum_pages(here.planes, here.ids, tokens, backend=gpu) == (
        codec.checksum_pages(source.planes, source.ids, tokens, backend=reference)
    )


@pytest.mark.parametrize(("name", "tokens", "slots", "dim", "kind"), CASES)
def test_kernels_write_and_read_the_reference_bytes(
    name: str, tokens: int, slots: int, dim: int, kind: str | float
) -> None:
    book = BOOKS[name]
    source = make_pages(
        tokens, num_planes=3, kv_heads=2, slots=slots, dim=dim, kind=kind, book=book
    )
    check(source, [book, None, book])


@pytest.mark.parametrize(
    ("name", "slots", "dim"),
    [
        (element.name, *sizes)
        for number, element in enumerate(INTEGER_TYPES)
        for at, sizes in enumerate([(16, 64), (5, 7)])
        if DEVICE.type == "cuda" or at == number % 2
    ],
)
def test_integer_planes_are_stored_raw_with_the_reference_bytes(
    name: str, slots: int, dim: int
) -> None:
    dtype = BY_NAME[name].dtype
    source = make_pages(17, kv_heads=2, slots=slots, dim=dim, kind="random", dtype=dtype)
    check(source, [None, None])
    planes = on_device(source).planes
    target = [torch.zeros_like(plane) for plane in planes]
    out = torch.zeros(source.bound, dtype=torch.uint8, device=DEVICE)
    segment = codec.EncodeSegment(source.ids, 17, 0, len(out))
    encoded = PagedCodec(planes, [None, None]).encode_batch([segment], out)[0].result()
    written = codec.DecodeSegment(source.ids, 17, 0, encoded.length, encoded.checksum)
    PagedCodec(target, [None, None]).decode_batch([written], out)[0].result()
    assert encoded.raw_bytes == 2 * 2 * 17 * dim * dtype.itemsize
    back = Pages([plane.cpu() for plane in target], source.ids, 17, source.generator)
    assert torch.equal(back.content(), source.content())


def test_segment_of_planes_with_different_modes() -> None:
    modes = ("top16-window", "three_bit-gaps", "inband-window", "top16-gaps")
    source = make_pages(17, num_planes=5, kv_heads=1, kind=0.02)
    check(source, [*(BOOKS[f"bf16-{mode}"] for mode in modes), None])


def test_column_with_more_than_eight_escapes() -> None:
    """One column has 32 escapes, and the kernel loads eight second-level codes at a time."""
    book = BOOKS["bf16-three_bit-window"]
    chunk = torch.full((1, 1, 1024, 1), book.exponents[0] << 7)
    column = torch.tensor([8 * (32 * row + 5) + e for row in range(4) for e in range(8)])
    chunk[0, 0, column, 0] = torch.tensor([*book.second, 3] * 2) << 7
    source = Pages([from_bits(chunk)], [0], 1024, torch.Generator())
    check(source, [book])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes a minute on the CPU")
@pytest.mark.parametrize("max_direct_chunks", [0, 8192])
def test_entries_of_more_chunks_than_a_program_packs(
    max_direct_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment has 258 chunks of one element; a program packs the entries of 256."""
    monkeypatch.setattr(launch, "_MAX_DIRECT_CHUNKS", max_direct_chunks)
    book = BOOKS["bf16-top16-window"]
    source = make_pages(258, num_planes=1, kv_heads=1, slots=1, dim=1, kind="random")
    _, payload = encode(source, reference, [book])
    encoded, written = encode(on_device(source), gpu, [book])
    assert encoded.escapes > 0
    assert torch.equal(written.cpu(), payload)


def test_unaligned_segment_is_rejected() -> None:
    book = BOOKS["bf16-top16-window"]
    pages = on_device(make_pages(17, num_planes=1, kv_heads=1))
    out = torch.zeros(pages.bound + 8, dtype=torch.uint8, device=DEVICE)[8:]
    with pytest.raises(codec.InvalidBuffer):
        codec.encode_pages(pages.planes, [book], pages.ids, 17, out, backend=gpu)
    segment = codec.EncodeSegment(pages.ids, 17, 0, len(out))
    with pytest.raises(codec.InvalidBuffer):
        PagedCodec(pages.planes, [book]).encode_batch([segment], out)


def test_paged_codec_returns_results_later() -> None:
    """Start encoding four segments of different lengths, modes and pages, then read the results."""
    books: list[Codebook | None] = [BOOKS["bf16-three_bit-window"], BOOKS["bf16-top16-gaps"], None]
    source = on_device(make_pages(80, num_planes=3, kv_heads=2, kind=0.02))
    target = on_device(source.empty_like())
    coded, raw = PagedCodec(source.planes, books), PagedCodec(source.planes, [None] * 3)
    reader = PagedCodec(target.planes, books)
    started = []
    for sender, first, tokens in [(coded, 0, 32), (raw, 2, 32), (coded, 4, 9), (coded, 1, 16)]:
        ids = source.ids[first : first + -(-tokens // 16)]
        out = torch.zeros(source.bound, dtype=torch.uint8, device=DEVICE)
        segment = codec.EncodeSegment(ids, tokens, 0, len(out))
        started.append((segment, out, sender is raw, sender.encode_batch([segment], out)[0]))
    decoded = []
    for (page_ids, tokens, _, _), out, is_raw, encoding in started:
        encoded = encoding.result()
        assert encoding.done
        assert encoding.seconds >= 0
        payload = out[: encoded.length]
        header = codec.read_header(payload)
        assert encoded.checksum == header.checksum
        written = codec.DecodeSegment(page_ids, tokens, 0, len(payload), header.checksum, is_raw)
        decoded += reader.decode_batch([written], out)
    for each in decoded:
        each.result()
    for mine, theirs in zip(source.planes, target.planes, strict=True):
        assert torch.equal(bits(mine)[source.ids[:4]], bits(theirs)[source.ids[:4]])
        last = source.ids[4]
        assert torch.equal(bits(mine)[last][:, :9], bits(theirs)[last][:, :9])
    with pytest.raises(codec.InvalidPages):
        coded.encode_batch([codec.EncodeSegment([], 0, 0, 64)], out)
    with pytest.raises(codec.BufferTooSmall):
        coded.encode_batch([codec.EncodeSegment(source.ids[:2], 32, 0, 64)], out)


def test_starts_outside_the_payload_are_rejected() -> None:
    """An entry start points beyond the payload, into memory that contains valid entries."""
    book = BOOKS["bf16-top16-window"]
    source = Pages([from_bits(torch.full((1, 1, 1024, 1), 120 << 7))], [0], 1024, torch.Generator())
    _, payload = encode(source, reference, [book])
    payload[codec.read_header(payload).layout.starts + 4] = 100
    memory = torch.cat([payload.view(torch.int32), torch.full((256,), 200 << 16 | 7)]).int()
    inside = memory.to(DEVICE).view(torch.uint8)[: len(payload)]
    target = on_device(source.empty_like())
    with pytest.raises(codec.FormatError):
        codec.decode_pages(inside, target.planes, [book], [0], 1024, backend=gpu)
    assert set(bits(target.planes[0]).flatten().tolist()) == {120 << 7}


def test_planes_of_different_strides_are_rejected() -> None:
    planes = [
        torch.zeros(4, 2, 16, 64).bfloat16(),
        torch.zeros(2, 4, 16, 64).bfloat16().transpose(0, 1),
    ]
    planes = [plane.to(DEVICE) for plane in planes]
    out = torch.zeros(codec.max_segment_bytes(2, 2, 64, 16, 16), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(codec.InvalidPlanes):
        codec.encode_pages(planes, [None, None], [0], 16, out, backend=gpu)


@pytest.mark.parametrize("name", ["bf16-top16-window", "bf16-three_bit-window"])
@pytest.mark.parametrize("part", ["starts", "codes", "entries"])
@pytest.mark.parametrize("value", [0, 1, 255])
def test_damaged_payloads_raise_and_write_only_their_pages(
    name: str, part: str, value: int
) -> None:
    book = BOOKS[name]
    books: list[Codebook | None] = [book, None, book]
    source = make_pages(17, num_planes=3, kv_heads=1, kind=0.02, book=book)
    _, payload = encode(source, reference, books)
    layout = codec.read_header(payload).layout
    at = {
        "starts": layout.starts + 5,
        "codes": layout.blocks[0].streams[0],
        "entries": layout.entries,
    }
    place = at[part] + 1
    payload[place] = value if int(payload[place]) != value else value ^ 7
    target = on_device(source.empty_like())
    before = [bits(plane).clone() for plane in target.planes]
    with pytest.raises((codec.FormatError, codec.ChecksumMismatch)):
        codec.decode_pages(payload.to(DEVICE), target.planes, books, target.ids, 17, backend=gpu)
    others = [page for page in range(len(before[0])) if page not in target.ids]
    for plane, was in zip(target.planes, before, strict=True):
        assert torch.equal(bits(plane)[others], was[others])
