"""State of one sequence whose KV a decode worker reads."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.pages.sent import SentTokens
from services.common.tracing import NO_SPAN, Span
from services.transfer.interval import Interval
from services.transfer.manifest import SegmentPlan
from services.transfer.policy import WireMode
from services.transfer.routes import Route
from services.transfer.slab import SlotRef


@dataclass
class SentSegment:
    """A segment that occupies a slot, from the start of its encode to its acknowledgement.

    Attributes:
        route: the route of the segment; the slab of its sender has the slot.
        ready: message to the reader that the segment is encoded; None until the end of the encode
            is processed on the event loop. Until then, the slot may be written to.
        timing: the reader's measurements; None until the acknowledgement, which may arrive before
            ``ready`` is set.
    """

    route: Route
    ref: SlotRef
    mode: WireMode
    ready: pb.SegmentReady | None = None
    timing: pb.SegmentTiming | None = None


@dataclass
class Outgoing:
    """One sequence whose KV a decode worker reads.

    Attributes:
        key: the engine's id of the sequence.
        reader: name of the decode worker's session; `SharedSlots` limits the slots of each session.
        peer: id of the decode worker; the link policy measures each peer.
        sequence: the reader's number of the sequence.
        sent: tokens and pages that are sent.
        span: span of the sequence on this worker.
        encodes: from the start of the first encode to the end of the last one.
        evicted: number of tokens that the engine has evicted.
        agent: name of the reader's agent, which receives notifications.
        slot_bytes: bytes of a slot of the reader's landing slabs.
        routes: ranks and KV heads between which its KV is sent.
        emit: callback that sends an event to the reader.
        fail: callback that ends the sequence with an error.
        credits: credits granted and not used yet, by rank of the reader.
        planned: segments to encode on each route, with `Computed.ready`.
        unacknowledged: segments whose encode was started, by index.
        issued: number of segments whose encode was started, which is the index of the next one.
        computed: whether all chunks of the prompt were added.
        closed: whether the sequence has ended.
    """

    key: str
    reader: str
    peer: str
    sequence: int
    sent: SentTokens
    request_id: str
    attempt: int
    agent: str
    slot_bytes: int
    routes: tuple[Route, ...]
    emit: Callable[[pb.PrefillEvent], None]
    fail: Callable[["error_pb2.ErrorCode.ValueType", str], None]
    span: Span = NO_SPAN
    encodes: Interval = field(default_factory=Interval)
    evicted: int = 0
    credits: dict[int, int] = field(init=False)
    planned: tuple[deque[tuple[SegmentPlan, int | None]], ...] = field(init=False)
    unacknowledged: dict[int, SentSegment] = field(default_factory=dict)
    issued: int = 0
    computed: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self.credits = dict.fromkeys((route.reader for route in self.routes), 0)
        self.planned = tuple(deque() for _ in self.routes)

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log lines about this sequence."""
        return {"request_id": self.request_id, **self.span.ids}

    @property
    def outstanding(self) -> int:
        """Planned segments that are not acknowledged yet."""
        return sum(map(len, self.planned)) + len(self.unacknowledged)

    @property
    def by_load(self) -> list[tuple[Route, deque[tuple[SegmentPlan, int | None]]]]:
        """Routes with their planned segments, those with the fewest segments in flight first."""
        in_flight = Counter(sent.route for sent in self.unacknowledged.values())
        pairs = zip(self.routes, self.planned, strict=True)
        return sorted(pairs, key=lambda pair: in_flight[pair[0]])

    @property
    def readable(self) -> bool:
        """Whether segments are encoded that the reader has not acknowledged."""
        return any(sent.ready is not None for sent in self.unacknowledged.values())

    def announce_if_complete(self) -> None:
        """If the last segment has been announced, emit the number of segments."""
        if self.computed and not any(self.planned):
            done = pb.PrefillDone(
                sequence=self.sequence, segments=self.issued, evicted_tokens=self.evicted
            )
            self.emit(pb.PrefillEvent(done=done))
