"""Calls of an endpoint in another process: results, errors, and the end of either side."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any

import pytest

from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import PagedCache
from runtime.pages.plan import PageCount
from services.transfer.codecs import SegmentCodecs
from services.transfer.endpoint import Source
from services.transfer.errors import PeerLost, ReadTimeout, TransferClosed
from services.transfer.frame import FrameHeader
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.nixl_agent import ReadDone
from services.transfer.remote_endpoint import RemoteEndpoint, serve_endpoint
from services.transfer.slab import Slab
from tests.services.transfer.test_ranks import BOOKS, HEADS, layout_of

LIMIT_S = 30
SOURCE = Source("peer", 1 << 40, "DRAM", 0)
HEADER = FrameHeader.of(pb.Segment(), epoch="0" * 32, request_id="r", attempt=0)


class Agent:
    """An agent whose calls end when the test says so."""

    name = "second"
    metadata = connection_metadata = b"metadata"
    busy_s = 3.0

    def __init__(self) -> None:
        self.fault: Future[None] = Future()
        self.closed = threading.Event()
        self.reads: list[Future[ReadDone]] = []
        self.jobs = 0

    def register(self, slab: Slab) -> None:
        pass

    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        future: Future[None] = Future()
        if metadata == b"lost":
            future.set_exception(PeerLost(f"peer {name} does not answer"))
        else:
            future.set_result(None)
        return future

    def read(self, *_: object, **__: object) -> "Future[ReadDone]":
        self.reads.append(Future())
        return self.reads[-1]

    def run_codec(self, job: object) -> "Future[Any]":
        self.jobs += 1
        return Future()

    def codec_idle(self) -> "Future[None]":
        return self.add_peer("", b"")

    def close(self) -> None:
        self.closed.set()


class Sides:
    """A remote endpoint, and the endpoint that it calls, on another thread."""

    def __init__(self) -> None:
        self.agent = Agent()
        own, self.pipe = Pipe()
        cache = PagedCache(layout_of(HEADS), PageCount(1))
        codecs = SegmentCodecs(cache.layout, BOOKS, first_kv_head=HEADS)
        agent: Any = self.agent
        local = LocalEndpoint(cache, codecs, Slab(2, 1 << 14), agent)
        self.thread = threading.Thread(target=serve_endpoint, args=(self.pipe, local), daemon=True)
        self.thread.start()
        self.remote = RemoteEndpoint(own, BOOKS)

    def decode(self, *, is_wanted: bool) -> "Future[Any]":
        segment = pb.Segment(num_tokens=16, num_layers=1, num_kv_heads=1, first_kv_head=HEADS)
        return self.remote.decode(
            segment, pb.SegmentReady(), HEADER, 0, (0,), after=None, is_wanted=lambda: is_wanted
        )


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.remote.close()
    assert sides.agent.closed.wait(LIMIT_S)


def test_shape_and_descriptions_are_those_of_the_other_process(sides: Sides) -> None:
    remote = sides.remote
    assert remote.kv_heads == range(HEADS, 2 * HEADS)
    assert (remote.slots, remote.slot_bytes) == (2, 1 << 14)
    assert remote.readable.slots == 2
    assert remote.connection == pb.Endpoint(
        agent_name="second", agent_metadata=b"metadata", first_kv_head=HEADS, num_kv_heads=HEADS
    )


def test_results_and_errors_are_returned(sides: Sides) -> None:
    assert sides.remote.add_peer("a", b"").result(LIMIT_S) is None
    with pytest.raises(PeerLost, match="peer b does not answer"):
        sides.remote.add_peer("b", b"lost").result(LIMIT_S)
    reading = sides.remote.read(SOURCE, 1, 64, deadline_s=1)
    sides.remote.codec_idle().result(LIMIT_S)  # calls are executed in order
    assert not reading.cancel(), "the READ may write to its slot"
    sides.agent.reads[0].set_result(ReadDone(1.0, 0.5))
    assert reading.result(LIMIT_S) == ReadDone(1.0, 0.5)
    with pytest.raises(Exception, match="slot 2 does not exist"):
        sides.remote.read(SOURCE, 2, 64, deadline_s=1).result(LIMIT_S)


def test_overdue_read_reports_when_it_has_drained(sides: Sides) -> None:
    reading = sides.remote.read(SOURCE, 0, 64, deadline_s=1)
    sides.remote.codec_idle().result(LIMIT_S)
    drained: Future[None] = Future()
    sides.agent.reads[0].set_exception(ReadTimeout("overdue", drained))
    with pytest.raises(ReadTimeout, match="overdue") as overdue:
        reading.result(LIMIT_S)
    sides.remote.codec_idle().result(LIMIT_S)
    assert not overdue.value.drained.done()
    drained.set_result(None)
    overdue.value.drained.result(LIMIT_S)


def test_unwanted_decode_is_not_started(sides: Sides) -> None:
    assert sides.decode(is_wanted=False).result(LIMIT_S) is None
    sides.remote.codec_idle().result(LIMIT_S)
    assert sides.agent.jobs == 0
    decoding = sides.decode(is_wanted=True)
    sides.remote.codec_idle().result(LIMIT_S)
    assert sides.agent.jobs == 1
    assert not decoding.done()


def test_busy_time_is_that_of_the_other_process(sides: Sides) -> None:
    assert sides.remote.busy_s == 0.0
    sides.remote.codec_idle().result(LIMIT_S)
    assert sides.remote.busy_s == 3.0


def test_close_ends_the_other_side_without_a_fault(sides: Sides) -> None:
    waiting = sides.remote.read(SOURCE, 0, 64, deadline_s=1)
    sides.remote.close()
    sides.thread.join(LIMIT_S)
    with pytest.raises(TransferClosed):
        waiting.result(LIMIT_S)
    with pytest.raises(TransferClosed):
        sides.remote.add_peer("a", b"").result(LIMIT_S)
    assert not sides.remote.fault.done()


def test_fault_of_the_other_process_is_reported(sides: Sides) -> None:
    sides.agent.fault.set_exception(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        sides.remote.fault.result(LIMIT_S)


def test_end_of_the_other_process_fails_all_calls(sides: Sides) -> None:
    """The end of a process closes its pipe, and its memory is no longer read into."""
    reading = sides.remote.read(SOURCE, 0, 64, deadline_s=1)
    sides.remote.codec_idle().result(LIMIT_S)
    sides.remote._pipe.send(None)
    with pytest.raises(TransferClosed, match="has ended"):
        reading.result(LIMIT_S)
    with pytest.raises(TransferClosed, match="has ended"):
        sides.remote.fault.result(LIMIT_S)
    with pytest.raises(TransferClosed, match="has ended"):
        sides.remote.codec_idle().result(LIMIT_S)
