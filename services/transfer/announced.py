"""Announced segments that wait until they are ready to be read."""

from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError

from headrace.v1 import prefill_pb2 as pb

log = structlog.get_logger()


class AnnouncedSegments:
    """Starts READs when the sender says that segments are ready; a `NotificationListener`.

    It says so twice, by a notification and by an event of its session. The one that arrives first
    starts the READ. Notifications are not authenticated: what they say is verified after the READ,
    as for events. Methods may run on any thread.

    Args:
        on_waiting: called when the first segment is added, so that notifications are polled.
    """

    def __init__(self, *, on_waiting: Callable[[], None]) -> None:
        self._on_waiting = on_waiting
        self._starts: dict[tuple[str, int, int], Callable[[pb.SegmentReady], None]] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._starts)

    def add(self, peer: str, segment: pb.Segment, start: Callable[[pb.SegmentReady], None]) -> None:
        """Call ``start`` once when a segment of a peer's agent is ready, on any thread."""
        self._starts[peer, segment.sequence, segment.index] = start
        if len(self._starts) == 1:
            self._on_waiting()

    def discard(self, peer: str, segment: pb.Segment) -> bool:
        """Stop waiting for a segment; return False if its READ was started already."""
        return self._starts.pop((peer, segment.sequence, segment.index), None) is not None

    def ready(self, peer: str, ready: pb.SegmentReady) -> None:
        """Start the READ of a segment, unless that was done already."""
        start = self._starts.pop((peer, ready.sequence, ready.index), None)
        if start is not None:
            start(ready)

    def notified(self, peer: str, message: bytes) -> None:
        try:
            ready = pb.SegmentReady.FromString(message)
        except DecodeError:
            log.warning("a notification is malformed", agent=peer, length=len(message))
            return
        self.ready(peer, ready)
