"""Announced segments that wait until they are ready to be read."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from headrace.v1 import prefill_pb2 as pb

log = structlog.get_logger()

_MAX_EARLY = 256
"""Maximum number of notifications that are kept for segments that are not announced yet."""

_Key = tuple[str, int, int]
"""Agent of the sender, sequence, index of the segment."""


@dataclass(frozen=True)
class _Waiting:
    nonce: int
    start: Callable[[pb.SegmentReady], None]


class AnnouncedSegments:
    """Starts READs when the sender reports segments as ready; a `NotificationListener`.

    Each segment is reported by a notification and, unless it is acknowledged within 2 ms, by an
    event of the session. The one that arrives first starts the READ. NIXL does not authenticate
    notifications, so one without the nonce that the session announced is ignored. Methods may run
    on any thread.

    Args:
        on_waiting: called when the first segment is added, so that notifications are polled.
    """

    def __init__(self, *, on_waiting: Callable[[], None]) -> None:
        self._on_waiting = on_waiting
        self._lock = threading.Lock()
        self._waiting: dict[_Key, _Waiting] = {}
        self._early: OrderedDict[_Key, pb.SegmentReady] = OrderedDict()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, peer: str, segment: pb.Segment, start: Callable[[pb.SegmentReady], None]) -> None:
        """Call ``start`` exactly once, on any thread, when a segment of a peer's agent is ready."""
        key = peer, segment.sequence, segment.index
        with self._lock:
            early = self._early.pop(key, None)
            is_early = early is not None and early.nonce == segment.nonce
            if not is_early:
                self._waiting[key] = _Waiting(segment.nonce, start)
            is_first = len(self._waiting) == 1
        if early is not None and is_early:
            start(early)
        elif is_first:
            self._on_waiting()

    def discard(self, peer: str, segment: pb.Segment) -> bool:
        """Stop waiting for a segment; return False if its READ was started already."""
        with self._lock:
            return self._waiting.pop((peer, segment.sequence, segment.index), None) is not None

    def ready(self, peer: str, ready: pb.SegmentReady) -> None:
        """Start the READ of a segment, unless that was done already."""
        self._start(peer, ready, keep=False)

    def notified(self, peer: str, message: bytes) -> None:
        try:
            ready = pb.SegmentReady.FromString(message)
        except DecodeError:
            log.warning("a notification is malformed", agent=peer, length=len(message))
            return
        self._start(peer, ready, keep=True)

    def _start(self, peer: str, ready: pb.SegmentReady, *, keep: bool) -> None:
        """Start a READ.

        Store the message if the segment is not announced yet and ``keep`` is true.
        """
        key = peer, ready.sequence, ready.index
        with self._lock:
            found = self._waiting.get(key)
            if found is not None and found.nonce == ready.nonce:
                del self._waiting[key]
            elif found is None and keep:
                self._early[key] = ready
                if len(self._early) > _MAX_EARLY:
                    self._early.popitem(last=False)
        if found is not None and found.nonce == ready.nonce:
            found.start(ready)
