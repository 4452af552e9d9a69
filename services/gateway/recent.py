"""Requests that the live page lists, by tenant: running, ended, and ended without a worker."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from services.common.errors import ServiceError
from services.common.tracing import NO_SPAN, Span
from services.gateway.keys import ApiKeys, Tenant
from services.gateway.metrics import GatewayMetrics
from services.gateway.requests import GenerationRequest
from services.gateway.timeline import RequestTimeline

MAX_RUNNING = 12
"""Running requests of a tenant that are listed, the oldest ones."""
MAX_ENDED = 12
"""Ended requests of a tenant that are kept, the newest ones."""
UNPLACED_S = 600.0
"""Time in seconds for which a group of unplaced requests is kept after its last request."""


@dataclass
class Unplaced:
    """Requests that ended in the same way before a worker was chosen, such as refusals.

    Attributes:
        since: monotonic time at which the first one ended, seconds.
        newest: the last one.
    """

    count: int
    since: float
    newest: RequestTimeline


class TenantRequests:
    """Requests of one tenant.

    The setting ``max_concurrent`` bounds the number of running requests, and the number of error
    codes that of the groups.

    Attributes:
        running: running requests by number, in order of arrival.
        ended: requests that a worker began, newest first.
        unplaced: groups of other ended requests, by status.
    """

    def __init__(self) -> None:
        self.running: dict[int, RequestTimeline] = {}
        self.ended: deque[RequestTimeline] = deque(maxlen=MAX_ENDED)
        self.unplaced: dict[str, Unplaced] = {}

    def end(self, timeline: RequestTimeline) -> None:
        """Move a request, which has just ended, to the ended ones."""
        del self.running[timeline.number]
        if timeline.was_placed:
            self.ended.appendleft(timeline)
            return
        self._drop_old(timeline.ended)
        group = self.unplaced.setdefault(timeline.status, Unplaced(0, timeline.ended, timeline))
        group.count += 1
        group.newest = timeline

    def describe(self, now: float) -> dict[str, Any]:
        """Return the requests at monotonic time ``now`` for JSON; times in seconds."""
        self._drop_old(now)
        listed = islice(self.running.values(), MAX_RUNNING)
        return {
            "running": [timeline.describe(now) for timeline in listed],
            "running_total": len(self.running),
            "ended": [timeline.describe(now) for timeline in self.ended],
            "unplaced": [
                {
                    "status": status,
                    "count": group.count,
                    "since_s": round(now - group.since, 3),
                    "last_s": round(now - group.newest.ended, 3),
                    "newest": group.newest.describe(now),
                }
                for status, group in self.unplaced.items()
            ],
        }

    def _drop_old(self, now: float) -> None:
        for status, group in tuple(self.unplaced.items()):
            if now - group.newest.ended > UNPLACED_S:
                del self.unplaced[status]


class RecentRequests:
    """Running and recent requests of all tenants.

    Requests without a tenant belong to None. When a new tenant sends a request, the requests of
    tenants without an API key are dropped. The API keys thus bound the number of tenants.
    """

    def __init__(self, metrics: GatewayMetrics, keys: ApiKeys) -> None:
        self._metrics = metrics
        self._keys = keys
        self._number = 0
        self._tenants: dict[str | None, TenantRequests] = {}

    def of(self, tenant: str | None) -> TenantRequests:
        """Return the requests of a tenant."""
        return self._tenants.get(tenant) or TenantRequests()

    @contextmanager
    def follow(self, request: GenerationRequest, span: Span) -> Iterator[RequestTimeline]:
        """Return the timeline of a request that ends with the ``with`` block.

        Args:
            span: span of the generation.
        """
        kept = self._requests_of(request.context.tenant)
        self._number += 1
        timeline = RequestTimeline(request, self._number, self._metrics, span)
        kept.running[timeline.number] = timeline
        try:
            with timeline.ending():
                yield timeline
        finally:
            kept.end(timeline)

    def refuse(self, request: GenerationRequest, error: ServiceError) -> None:
        """List a request that the gateway refuses with an error."""
        with suppress(ServiceError), self.follow(request, NO_SPAN):
            raise error

    def _requests_of(self, tenant: Tenant | None) -> TenantRequests:
        name = tenant.name if tenant else None
        if name not in self._tenants:
            for former in self._tenants.keys() - self._keys.tenants:
                del self._tenants[former]
            self._tenants[name] = TenantRequests()
        return self._tenants[name]
