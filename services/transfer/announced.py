"""Announced segments that wait until they are ready to be read."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError

from headrace.v1 import prefill_pb2 as pb

log = structlog.get_logger()

_MAX_EARLY = 256
"""Maximum number of notifications that are kept for segments that are not announced yet."""

_Key = tuple[str, int, int, int]
"""Agent of the sender, sequence, index of the segment, nonce."""


class AnnouncedSegments:
    """Starts READs when the sender reports segments as ready.

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
        self._waiting: dict[_Key, Callable[[pb.SegmentReady], None]] = {}
        self._early: OrderedDict[_Key, pb.SegmentReady] = OrderedDict()

    @property
    def waiting(self) -> bool:
        """Whether notifications are expected."""
        return bool(self._waiting)

    def add(self, peer: str, segment: pb.Segment, start: Callable[[pb.SegmentReady], None]) -> None:
        """Call ``start`` exactly once, on any thread, when a segment of a peer's agent is ready."""
        key = _key(peer, segment)
        with self._lock:
            early = self._early.pop(key, None)
            if early is None:
                self._waiting[key] = start
            is_first = len(self._waiting) == 1
        if early is not None:
            start(early)
        elif is_first:
            self._on_waiting()

    def discard(self, peer: str, segment: pb.Segment) -> bool:
        """Stop waiting for a segment; return False if its READ was started already."""
        with self._lock:
            return self._waiting.pop(_key(peer, segment), None) is not None

    def ready(self, peer: str, ready: pb.SegmentReady) -> None:
        """Start the READ of a segment, unless that was done already."""
        self._start(peer, ready, keep=False)

    def notified(self, peer: str, message: bytes) -> None:
        """Process a notification, whose content is untrusted. Called on the transfer thread."""
        try:
            ready = pb.SegmentReady.FromString(message)
        except DecodeError:
            log.warning("a notification is malformed", agent=peer, length=len(message))
            return
        self._start(peer, ready, keep=True)

    def _start(self, peer: str, ready: pb.SegmentReady, *, keep: bool) -> None:
        """Start the READ of a segment if it is announced and was not started yet.

        If it is not announced and ``keep`` is true, store the message.
        """
        key = _key(peer, ready)
        with self._lock:
            start = self._waiting.pop(key, None)
            if start is None and keep:
                self._early[key] = ready
                if len(self._early) > _MAX_EARLY:
                    self._early.popitem(last=False)
        if start is not None:
            start(ready)


def _key(peer: str, message: pb.Segment | pb.SegmentReady) -> _Key:
    return peer, message.sequence, message.index, message.nonce
