"""Calls in flight and CUDA graphs of the paged codec."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import codec
from codec.gpu import graphs
from codec.gpu.descriptors import Descriptors, SegmentCall
from codec.gpu.kernels import parameters
from codec.gpu.launch import Launch, Workspace
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
    shape = coder._coded.shape
    cpu = torch.device("cpu")
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


class _FakeLaunch:
    """Logs the calls of a launch."""

    def __init__(self, raw_bytes: int, log: list[str]) -> None:
        self.raw_bytes = raw_bytes
        self.results = np.zeros((1, int(parameters.RESULT_HEADER)), dtype=np.int64)
        self.copy, self.fetch, self.encode, self.decode = (
            lambda name=name: log.append(name) for name in ("copy", "fetch", "encode", "decode")
        )
        self.describe = lambda _segments: log.append("describe")


class _FakeEvent:
    """Logs `synchronize`; the work before it never ends by itself."""

    log: list[str]

    def __init__(self, **_options: bool) -> None: ...

    def record(self, _stream: object) -> None:
        self.log.append("record")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.log.append("synchronize")


class _FakeStreams:
    """Logs copies, captures and replays."""

    calls = None

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def copy(self, start: Callable[[], None]) -> None:
        start()
        self._log.append("wait for the copy")

    def capture(self, run: Callable[[], None]) -> Any:
        run()
        return SimpleNamespace(replay=lambda: self._log.append("replay"))


@pytest.mark.parametrize("direction", list(graphs.Direction))
@pytest.mark.parametrize("raw_bytes", [(64 << 20) - 1, 64 << 20])
def test_large_calls_copy_their_descriptors_outside_of_the_graph(
    raw_bytes: int, direction: graphs.Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(_FakeEvent, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", _FakeEvent)
    launch: Any = _FakeLaunch(raw_bytes, log)
    slot = graphs.Slot(launch, direction, _FakeStreams(log))  # type: ignore[arg-type]
    large = raw_bytes >= 64 << 20
    launches = [str(direction)] if large else ["fetch", str(direction)]
    assert log == [*launches, "record", *launches]  # compiled, then captured
    copies = ["copy", "wait for the copy"] if large else []
    for _ in range(2):  # the descriptors are overwritten only after the previous run
        log.clear()
        slot.start([])
        assert log == ["synchronize", "describe", *copies, "replay", "record"]


def test_raw_bytes_of_a_launch_are_those_of_its_largest_call() -> None:
    planes = make_pages(40, num_planes=2, kv_heads=3).planes
    coder = PagedCodec(planes, [BOOK, None])
    cpu = torch.device("cpu")
    launch = Launch(coder._coded.shape, 4, 3, cpu, Workspace(cpu))
    assert launch.raw_bytes == 4 * coder._coded.of(48).raw_bytes


class _FakeSlot:
    """A slot that is busy until a test changes `idle`."""

    def __init__(self, launch: Any, direction: graphs.Direction, _streams: None) -> None:
        self.size = launch
        self.direction = direction
        self.idle = True

    def start(self, _segments: object) -> "_FakeSlot":
        self.idle = False
        return self


@pytest.fixture
def new_graphs() -> Iterator[None]:
    """No calls have been captured before the test, and none are kept after it."""
    graphs.graphs_of.cache_clear()
    yield
    graphs.graphs_of.cache_clear()


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch, new_graphs: None) -> list[_FakeSlot]:
    """Replace slots by fakes. Returns those captured so far."""
    captured: list[_FakeSlot] = []

    def capture(*arguments: Any) -> _FakeSlot:
        captured.append(_FakeSlot(*arguments))
        return captured[-1]

    monkeypatch.setattr(graphs, "Launch", lambda _shape, segments, pages, *_: (segments, pages))
    monkeypatch.setattr(graphs, "Slot", capture)
    return captured


def _new_graphs() -> graphs.Graphs:
    return graphs.Graphs(None, torch.device("cpu"), None, None)  # type: ignore[arg-type]


def _start(calls: graphs.Graphs, segments: int, pages: int, direction: str = "encode") -> _FakeSlot:
    """Start a call and return its slot."""
    each = SegmentCall(None, np.arange(pages), 0)  # type: ignore[arg-type]
    return calls.start(graphs.Direction(direction), [each] * segments)  # type: ignore[return-value]


def test_calls_capture_slots_up_to_the_maximum_without_warm_up(slots: list[_FakeSlot]) -> None:
    calls = _new_graphs()
    _start(calls, 4, 4).idle = True  # a larger size, which is not used
    started = [_start(calls, 1, 2) for _ in range(graphs.MAX_IN_FLIGHT)]
    assert started == slots[1:]
    assert [_start(calls, 1, 2) for _ in range(3)] == started[:3]  # the oldest first
    started[3].idle = True
    assert _start(calls, 1, 2) is started[3]
    assert len(slots) == 1 + graphs.MAX_IN_FLIGHT


def test_prepared_calls_use_the_smallest_idle_slot_that_fits(slots: list[_FakeSlot]) -> None:
    calls = _new_graphs()
    encode = graphs.Direction.ENCODE
    decode = graphs.Direction.DECODE
    for segments, pages in ((1, 2), (2, 2), (1, 3), (8, 1), (1, 8), (2, 8)):
        calls.prepare(encode, segments, pages)
    calls.prepare(decode, 1, 4)
    sizes = [_start(calls, 1, 2).size for _ in range(5)]
    assert sizes == [(1, 2), (1, 3), (2, 2), (1, 8), (2, 8)]
    assert {slot.size for slot in slots if slot.idle} == {(8, 1), (1, 4)}  # these do not fit
    assert len(slots) == 7


def test_prepared_calls_wait_for_the_oldest_of_their_size(slots: list[_FakeSlot]) -> None:
    calls = _new_graphs()
    encode = graphs.Direction.ENCODE
    calls.prepare(encode, 1, 2, slots=2)
    calls.prepare(encode, 1, 4)
    first, second, larger = (_start(calls, 1, 2) for _ in range(3))
    assert larger.size == (1, 4)
    assert [_start(calls, 1, 2) for _ in range(3)] == [first, second, first]
    larger.idle = True
    assert _start(calls, 1, 2) is larger
    second.idle = True
    assert _start(calls, 1, 2) is second
    assert len(slots) == 3


def test_calls_of_a_size_that_was_not_prepared_capture_one_slot(slots: list[_FakeSlot]) -> None:
    calls = _new_graphs()
    calls.prepare(graphs.Direction.ENCODE, 1, 2)
    assert [_start(calls, 2, 1).size for _ in range(3)] == [(2, 1)] * 3
    assert len(slots) == 2


def test_slots_prepared_after_a_call_are_used_first(slots: list[_FakeSlot]) -> None:
    calls = _new_graphs()
    busy = _start(calls, 1, 2)
    for _ in range(2):  # the second time, there are enough
        calls.prepare(graphs.Direction.ENCODE, 1, 2, slots=3)
    started = [_start(calls, 1, 2) for _ in range(3)]
    assert set(started[:2]) == set(slots) - {busy}
    assert started[2] is busy


def test_warm_up_prepares_more_slots_of_the_largest_sizes(slots: list[_FakeSlot]) -> None:
    coder = PagedCodec(make_pages(40, num_planes=2, kv_heads=1).planes, [BOOK, None])
    pages = graphs.sizes_up_to(min(4, len(coder._planes[0])))
    coder.warm_up(pages[-1] * 16, max_segments=2)
    expected = [(segments, each) for segments in (1, 2) for each in [*pages, pages[-1], pages[-1]]]
    encodes = [slot.size for slot in slots if slot.direction is graphs.Direction.ENCODE]
    decodes = [slot.size for slot in slots if slot.direction is graphs.Direction.DECODE]
    assert sorted(encodes) == sorted(expected)
    assert sorted(decodes) == sorted(2 * expected)  # with codebooks, and raw


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
@pytest.mark.usefixtures("new_graphs")
@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize("second_stream_bytes", [0, 1 << 40])
def test_calls_in_flight_on_two_streams(
    second_stream_bytes: int, warm_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start 40 calls of different lengths on two streams, then read all results."""
    monkeypatch.setattr(graphs, "_SECOND_STREAM_BYTES", second_stream_bytes)
    source = [torch.randn(600, 2, 16, 64, device=CUDA).bfloat16() for _ in range(2)]
    target = [torch.zeros_like(plane) for plane in source]
    coder, reader = codec.paged(source, [BOOK] * 2), codec.paged(target, [BOOK] * 2)
    ids = torch.randperm(600).tolist()
    used = 0
    bound = codec.max_segment_bytes(2, 2, 64, 240, 16)
    slab = torch.zeros(40 * bound, dtype=torch.uint8, device=CUDA)
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for stream in streams if warm_up else ():
        with torch.cuda.stream(stream):
            coder.warm_up(240)
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
