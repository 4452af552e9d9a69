"""Calls of an endpoint in another process: results, errors, and the end of either side."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any, TypeVar

import pytest
import torch

from headrace.v1 import prefill_pb2 as pb
from runtime.errors import EventTimeout
from runtime.graphs.events import Events
from runtime.kv.cache import PagedCache
from runtime.pages.plan import PageCount
from services.transfer.codec_calls import CodecJob, Timed
from services.transfer.codecs import SegmentCodecs
from services.transfer.errors import PeerLost, ReadTimeout, TransferClosed, TransferError
from services.transfer.frame import FrameHeader
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.nixl_agent import ReadDone
from services.transfer.remote_endpoint import RemoteEndpoint, serve_endpoint
from services.transfer.slab import Slab
from tests.services.transfer.inline_agent import InlineAgent
from tests.services.transfer.test_ranks import BOOKS, HEADS, layout_of

T = TypeVar("T")

LIMIT_S = 30
PEER = pb.Endpoint(agent_name="peer", slab_address=1 << 40, memory_kind="DRAM")
HEADER = FrameHeader.of(pb.Segment(), epoch="0" * 32, request_id="r", attempt=0)


class Agent:
    """An agent whose calls end when the test says so."""

    name = "second"
    metadata = connection_metadata = b"metadata"
    stalled_s = 3.0

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

    def run_codec(self, job: CodecJob[T]) -> "Future[Timed[T] | None]":
        self.jobs += 1
        return Future()

    def codec_idle(self) -> "Future[None]":
        return self.add_peer("", b"")

    def close(self) -> None:
        self.closed.set()


class CodecAgent(Agent):
    """An agent that runs codec calls."""

    run_codec = InlineAgent.run_codec
    notify = InlineAgent.notify


class Sides:
    """A remote endpoint, and the endpoint that it calls, on another thread.

    Attributes:
        cache: pages of the endpoint that is called.
    """

    def __init__(self, agent: Agent | None = None) -> None:
        self.agent = agent or Agent()
        own, self.pipe = Pipe()
        self.cache = PagedCache(layout_of(HEADS), PageCount(1))
        codecs = SegmentCodecs(self.cache.layout, BOOKS, first_kv_head=HEADS)
        called: Any = self.agent
        local = LocalEndpoint(self.cache, codecs, Slab(2, 1 << 14), called)
        self.thread = threading.Thread(target=serve_endpoint, args=(self.pipe, local), daemon=True)
        self.thread.start()
        self.remote = RemoteEndpoint(own, BOOKS)

    def decode(self, *, is_wanted: bool) -> "Future[Any]":
        segment = pb.Segment(num_tokens=16, num_layers=1, num_kv_heads=1, first_kv_head=HEADS)
        return self.remote.decode(
            segment, pb.SegmentReady(), HEADER, 0, (0,), after=None, is_wanted=lambda: is_wanted
        )

    def encode(self, *, after: int) -> "Future[Any]":
        segment = pb.Segment(
            num_tokens=16, num_layers=1, num_kv_heads=HEADS, first_kv_head=HEADS, raw=True
        )
        return self.remote.encode(
            segment, HEADER, (0,), after=after, notify="", is_wanted=lambda: True
        )

    def close(self) -> None:
        self.remote.close()
        assert self.agent.closed.wait(LIMIT_S)


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.close()


@pytest.fixture
def encoding_sides() -> Iterator[Sides]:
    """Sides whose agent runs codec calls."""
    sides = Sides(CodecAgent())
    yield sides
    sides.close()


def test_shape_and_descriptions_are_those_of_the_other_process(sides: Sides) -> None:
    remote = sides.remote
    assert remote.kv_heads == range(HEADS, 2 * HEADS)
    assert remote.slot_bytes == 1 << 14
    assert remote.readable.slots == 2
    assert remote.connection == pb.Endpoint(
        agent_name="second", agent_metadata=b"metadata", first_kv_head=HEADS, num_kv_heads=HEADS
    )


def test_results_and_errors_are_returned(sides: Sides) -> None:
    assert sides.remote.add_peer("a", b"").result(LIMIT_S) is None
    with pytest.raises(PeerLost, match="peer b does not answer"):
        sides.remote.add_peer("b", b"lost").result(LIMIT_S)
    reading = sides.remote.read(PEER, 0, 1, 64, deadline_s=1)
    sides.remote.codec_idle().result(LIMIT_S)  # calls are executed in order
    assert not reading.cancel(), "the READ may write to its slot"
    sides.agent.reads[0].set_result(ReadDone(1.0, 0.5))
    assert reading.result(LIMIT_S) == ReadDone(1.0, 0.5)
    with pytest.raises(Exception, match="slot 2 does not exist"):
        sides.remote.read(PEER, 0, 2, 64, deadline_s=1).result(LIMIT_S)


def test_overdue_read_reports_when_it_has_drained(sides: Sides) -> None:
    reading = sides.remote.read(PEER, 0, 0, 64, deadline_s=1)
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


def test_encode_that_overtakes_its_step_waits_for_it(encoding_sides: Sides) -> None:
    """Steps reach a rank through another pipe than its endpoint's calls do."""
    sides = encoding_sides
    encoding = sides.encode(after=1)
    sides.cache.events.record()
    assert not encoding.done(), "the step has not written its KV"
    for plane in sides.cache.planes:
        plane.fill_(3)
    sides.cache.events.record()
    checksum = encoding.result(LIMIT_S).value.ready.checksum
    assert checksum == sides.encode(after=1).result(LIMIT_S).value.ready.checksum
    for plane in sides.cache.planes:
        plane.zero_()
    assert checksum != sides.encode(after=1).result(LIMIT_S).value.ready.checksum


def test_encode_whose_step_never_comes_fails(encoding_sides: Sides) -> None:
    encoding_sides.cache.events = Events(torch.device("cpu"), wait_s=0.01)
    with pytest.raises(EventTimeout, match="event 0 was not recorded"):
        encoding_sides.encode(after=0).result(LIMIT_S)


def test_stall_is_that_of_the_other_process(sides: Sides) -> None:
    assert sides.remote.stalled_s == 0.0
    sides.remote.codec_idle().result(LIMIT_S)
    assert sides.remote.stalled_s == 3.0


def test_close_ends_the_other_side_without_a_fault(sides: Sides) -> None:
    waiting = sides.remote.read(PEER, 0, 0, 64, deadline_s=1)
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


def test_fault_that_cannot_be_pickled_is_reported(sides: Sides) -> None:
    class Local(BaseException):
        pass

    sides.agent.fault.set_exception(Local("a bug"))
    with pytest.raises(TransferError, match="a bug"):
        sides.remote.fault.result(LIMIT_S)


def test_end_of_the_other_process_fails_all_calls(sides: Sides) -> None:
    """The end of a process closes its pipe, and its memory is no longer read into."""
    reading = sides.remote.read(PEER, 0, 0, 64, deadline_s=1)
    sides.remote.codec_idle().result(LIMIT_S)
    sides.remote._pipe.send(None)
    with pytest.raises(TransferClosed, match="has ended"):
        reading.result(LIMIT_S)
    with pytest.raises(TransferClosed, match="has ended"):
        sides.remote.fault.result(LIMIT_S)
    with pytest.raises(TransferClosed, match="has ended"):
        sides.remote.codec_idle().result(LIMIT_S)


def test_answer_that_cannot_be_used_fails_all_calls_and_the_worker(sides: Sides) -> None:
    waiting = sides.remote.read(PEER, 0, 1, 64, deadline_s=1)
    sides.remote.codec_idle().result(LIMIT_S)  # the other side has read the call
    sides.pipe.send("not an answer")
    with pytest.raises(TransferClosed):
        waiting.result(LIMIT_S)
    with pytest.raises(TransferClosed):
        sides.remote.fault.result(LIMIT_S)
