"""Calls in flight and CUDA graphs of the paged codec."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import codec
from codec.gpu import graphs
from codec.gpu.descriptors import Descriptors, SegmentCall
from codec.gpu.kernels import parameters
from codec.gpu.paged import PagedCodec
from tests.codec.batches import aligned
from tests.codec.samples import BOOKS, bits, make_pages

CUDA = torch.device("cuda", 0)
BOOK = BOOKS["bf16-three_bit-window"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (97, 128), (96, 96)]
)
def test_sizes_of_graphs(count: int, expected: int) -> None:
    assert graphs.rounded(count) == expected


def test_sizes_up_to_a_count_include_the_size_of_each_smaller_count() -> None:
    sizes = graphs.sizes_up_to(100)
    assert {graphs.rounded(count) for count in range(1, 101)} == set(sizes)
    assert all(second <= 2 * first for first, second in pairwise(sizes))


def _calls(coder: PagedCodec, *tokens: int) -> list[SegmentCall]:
    """Return calls of segments with these numbers of tokens, all in pages 5, 6 and so on."""
    return [
        SegmentCall(coder._coded.of(count), np.arange(5, 5 + -(-count // 16)), 1 << 12, 1 << 10)
        for count in tokens
    ]


def test_descriptors_of_a_call_do_not_depend_on_the_previous_call() -> None:
    planes = make_pages(40, num_planes=2, kv_heads=1).planes
    coder = PagedCodec(planes, [BOOK, None])
    shape, cpu = coder._coded.shape, torch.device("cpu")
    used, fresh = (Descriptors(shape, 3, 3, cpu) for _ in range(2))
    used.write(_calls(coder, 48, 48, 17))
    for tokens in ((16, 40), (33, 33, 33), (1,)):
        used.write(_calls(coder, *tokens))
        fresh.host.zero_()
        fresh.write(_calls(coder, *tokens))
        for mine, theirs in zip(
            (used.segment_rows, *used.plane_rows),
            (fresh.segment_rows, *fresh.plane_rows),
            strict=True,
        ):
            assert torch.equal(mine, theirs)
        pages = sum(-(-count // 16) for count in tokens)
        assert torch.equal(used.page_ids[:pages], fresh.page_ids[:pages])


def test_seconds_of_a_call_are_divided_by_raw_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    coder = PagedCodec(make_pages(40, num_planes=1, kv_heads=1).planes, [BOOK])
    results = np.zeros((2, int(parameters.RESULT_HEADER)), dtype=np.int64)
    results[:, int(parameters.RESULT_NANOSECONDS)] = 1000, 4000  # until the end of each segment
    call = graphs.Call(None, _calls(coder, 30, 10))  # type: ignore[arg-type]
    monkeypatch.setattr(call, "results", lambda: results)
    assert [call.seconds(number) for number in range(2)] == pytest.approx([3e-6, 1e-6])


@pytest.mark.triton
def test_results_outlive_the_next_call_of_the_same_size() -> None:
    device = CUDA if torch.cuda.is_available() else torch.device("cpu")
    pages = make_pages(40, num_planes=1, kv_heads=1, kind=0.02, book=BOOK)
    coder = PagedCodec([plane.to(device) for plane in pages.planes], [BOOK])
    out = aligned(3 * pages.bound, device)
    parts = [
        codec.EncodeSegment([page], tokens, number * pages.bound, pages.bound)
        for number, (page, tokens) in enumerate(zip(pages.ids, (16, 9, 8), strict=True))
    ]
    pending = [coder.encode_batch([part], out)[0] for part in parts]
    for part, each in zip(parts, pending, strict=True):
        encoded = each.result()
        payload = out[part.offset : part.offset + encoded.length]
        assert codec.read_header(payload).checksum == encoded.checksum


@needs_gpu
@pytest.mark.gpu
def test_calls_in_flight_on_two_streams() -> None:
    """Start 40 calls of different lengths on two streams, then read all results."""
    source = [torch.randn(600, 2, 16, 64, device=CUDA).bfloat16() for _ in range(2)]
    target = [torch.zeros_like(plane) for plane in source]
    coder, reader = codec.paged(source, [BOOK] * 2), codec.paged(target, [BOOK] * 2)
    ids, used = torch.randperm(600).tolist(), 0
    bound = codec.max_segment_bytes(2, 2, 64, 240, 16)
    slab = torch.zeros(40 * bound, dtype=torch.uint8, device=CUDA)
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    started = []
    for number in range(40):
        tokens = 1 + number * 53 % 230
        pages = ids[used : used + -(-tokens // 16)]
        used += len(pages)
        part = codec.EncodeSegment(pages, tokens, number * bound, bound)
        with torch.cuda.stream(streams[number % 2]):
            started.append((part, coder.encode_batch([part], slab)[0]))
    segments = []
    for part, pending in started:
        encoded = pending.result()
        page_ids, tokens, offset, _ = part
        segments.append(
            codec.DecodeSegment(page_ids, tokens, offset, encoded.length, encoded.checksum)
        )
        assert pending.seconds > 0
    with torch.cuda.stream(streams[1]):
        decoded = reader.decode_batch(segments, slab)
    for result in decoded:
        result.result()
    for segment in segments:
        for mine, theirs in zip(source, target, strict=True):
            runs = [
                bits(plane)[segment.page_ids]
                .transpose(1, 2)
                .reshape(-1, 2, 64)[: segment.num_tokens]
                for plane in (mine, theirs)
            ]
            assert torch.equal(*runs)


@needs_gpu
@pytest.mark.gpu
def test_warm_up_captures_graphs_and_writes_no_page() -> None:
    planes = [torch.randn(64, 2, 16, 64, device=CUDA).bfloat16()]
    before = planes[0].clone()
    coder = PagedCodec(planes, [BOOK])
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        coder.warm_up(200, 3)
        torch.cuda.synchronize()
    assert torch.equal(bits(planes[0]), bits(before))
