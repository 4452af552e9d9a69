"""State of one fetch: a sequence whose KV another worker sends."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.v1 import decode_pb2, error_pb2, request_pb2, sampling_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.engine import Reserved
from runtime.pages.sent import SentTokens
from services.common.error_codes import error_reason
from services.common.tracing import NO_SPAN, Span
from services.transfer.interval import Interval
from services.transfer.manifest import Coverage


class FetchFailed(Exception):
    """The KV of a prompt did not arrive.

    Attributes:
        code: error code, by which the gateway decides whether to retry.
        worker_id: the worker that caused the failure, or "".
    """

    def __init__(
        self, code: "error_pb2.ErrorCode.ValueType", message: str, worker_id: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.worker_id = worker_id

    @property
    def reason(self) -> str:
        """Name of the error code, for the span of the fetch."""
        return error_reason(self.code)


@dataclass
class Fetch:
    """Request for the KV of one sequence that another worker computes, or has cached.

    Attributes:
        key: the engine's id of the sequence.
        prefill: the worker that sends the KV.
        request: the request for that worker.
        reserved: future of the decode worker's pages, into which the KV is decoded. Nothing is
            read before it is done.
        sent: tokens and pages that the prefill worker is asked to send.
        on_first: receives the first tokens; returns True if the sequence ends with them, so
            that no KV is needed.
        on_scored: receives log probabilities of prompt tokens, before the first tokens; None if
            they are not wanted.
        on_verified: called at most once, when all KV is verified and in the pages, with the times
            of the transfer. Only bookkeeping follows, so the sequence may be decoded.
        deadline_s: seconds from the start of the fetch.
        cached: whether to ask for KV in cached pages, and for no computation.
        span: span of the fetch, below which the prefill worker's span will be.
        closed: whether the fetch has failed, was cancelled, or needs no KV. If so, no decode is
            started.
    """

    key: str
    prefill: decode_pb2.WorkerAddress
    request: request_pb2.Request
    reserved: asyncio.Future[Reserved]
    sent: SentTokens
    on_first: Callable[[pb.FirstTokens], bool]
    on_verified: Callable[["FetchTimes"], None]
    deadline_s: float
    cached: bool = False
    on_scored: Callable[[sampling_pb2.PromptLogprobs], None] | None = None
    span: Span = NO_SPAN
    closed: bool = False


@dataclass
class FetchTimes:
    """Duration of each stage of one fetch, in seconds, and the number and sizes of its segments.

    Only segments that were read, verified and decoded count.

    Attributes:
        reads: from the start of the first READ to the end of the last one.
        decodes: from the start of the first codec decode to the end of the last one.
    """

    transfer: float = 0.0
    decode_kv: float = 0.0
    segments: int = 0
    wire_bytes: int = 0
    raw_bytes: int = 0
    reads: Interval = field(default_factory=Interval)
    decodes: Interval = field(default_factory=Interval)

    def add(self, ready: pb.SegmentReady, read_s: float, decode_s: float, ended: float) -> None:
        """Add the times and sizes of one segment.

        Args:
            ended: end of its decode, in seconds of `time.perf_counter`.
        """
        self.segments += 1
        self.transfer += read_s
        self.decode_kv += decode_s
        self.wire_bytes += ready.length
        self.raw_bytes += ready.raw_bytes
        self.reads.add(ended - decode_s - read_s, ended - decode_s)
        self.decodes.add(ended - decode_s, ended)

    def record(self, span: Span) -> None:
        """Record the transfer and the decodes as children of a span."""
        if not self.segments:
            return
        sizes = {
            "headrace.kv.segments": self.segments,
            "headrace.kv.wire_bytes": self.wire_bytes,
            "headrace.kv.raw_bytes": self.raw_bytes,
        }
        # The busy time is the sum over all segments, which may overlap.
        busy = "headrace.busy_seconds"
        span.record("transfer", self.reads.start, self.reads.end, {**sizes, busy: self.transfer})
        span.record(
            "decode_kv", self.decodes.start, self.decodes.end, {**sizes, busy: self.decode_kv}
        )


@dataclass
class FetchProgress:
    """Progress of one fetch.

    Attributes:
        coverages: for each rank, the KV that the announced segments hold.
        expected: total number of segments, once it is known.
        pulls: tasks of the segments announced so far.
        computing: whether the start of the computation was announced.
        started: whether the first tokens have arrived.
        ended: whether the sequence ended with its first tokens.
        reported: whether `Fetch.on_verified` was called.
    """

    coverages: Sequence[Coverage]
    times: FetchTimes = field(default_factory=FetchTimes)
    expected: int | None = None
    pulls: list["asyncio.Task[None]"] = field(default_factory=list)
    computing: bool = False
    started: bool = False
    ended: bool = False
    reported: bool = False

    @property
    def covered(self) -> bool:
        """Whether the announced segments hold all KV of the sequence."""
        return all(coverage.complete for coverage in self.coverages)

    @property
    def complete(self) -> bool:
        """Whether the first tokens have arrived and, if KV is needed, all segments."""
        return self.ended or (self.started and self.expected == self.times.segments)
