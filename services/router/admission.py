"""Admission to the queue of placement requests: calls that would wait too long are refused at once.

The time that a call will wait is predicted from the queue and from the rate at which calls left it
recently, in tokens per second. The rate reflects everything that limits placement: prompts, batch
slots, pages, and workers that other routers use as well. It is unknown, and nothing is refused, for
the first second of a queue after the workers were idle.
"""

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.common.encoder_placement import EncodePlaceRequest
from services.common.fair_queue import FairQueue, Queued
from services.common.placement import PlaceRequest
from services.common.rate import Rate
from services.common.router_errors import ErrorCode
from services.router.errors import Refusal

_MEMORY_S = 10.0
_KNOWN_AFTER_S = 1.0
_AVERAGED = 32
"""Number of requests over which the time on workers is averaged."""
_MAX_RETRY_AFTER_S = 60


class Waiting(Queued, Protocol):
    """A queued call. Times are in seconds of a monotonic clock.

    Attributes:
        admitted: whether the request was admitted before, so that it may wait until its deadline.
        request: the placement request. Calls for other models wait for other workers.
    """

    @property
    def arrived(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def admitted(self) -> bool: ...
    @property
    def request(self) -> PlaceRequest | EncodePlaceRequest: ...


W = TypeVar("W", bound=Waiting)


def surplus(queue: FairQueue[W], newest: W) -> W | None:
    """Return the call to refuse because a queue is full, after a new one was added.

    It is the last one of the tenant with the most queued tokens for its weight; if that is the
    tenant of the new call, it is the new one. Calls that were admitted before are not refused. None
    if there are no others.
    """
    last = queue.surplus(lambda call: not call.admitted)
    is_own = last is not None and last.tenant == newest.tenant
    return newest if is_own and not newest.admitted else last


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of the predicted wait. `RouterSettings` documents them."""

    shed_after_s: float = 2.0
    shed_ratio: float = 0.5


class Admission:
    """Predicts waits. There is no clock: times are in seconds of a monotonic clock."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._placed = Rate(_MEMORY_S, _KNOWN_AFTER_S)
        self._now = -math.inf
        self._request_s = 0.0
        self._ended = 0

    @property
    def limit_s(self) -> float:
        """Longest wait that is accepted, in seconds.

        This is the larger of ``shed_after_s`` and ``shed_ratio`` times the mean time on workers.
        """
        return max(self._limits.shed_after_s, self._limits.shed_ratio * self._request_s)

    def elapse(self, queue: FairQueue[W], now: float) -> None:
        """Advance the time. Call this before every change of the queue."""
        if len(queue):
            self._placed.add(0.0, now - self._now)
        else:
            self._placed.idle(now - self._now)
        self._now = now

    def reset(self) -> None:
        """Forget the rate. Call it when no worker has work: what made the rate slow is over."""
        self._placed.reset()

    def placed(self, call: Waiting) -> None:
        """Record that a call left the queue because it was placed."""
        self._placed.add(call.cost, 0.0)

    def ended(self, request_s: float) -> None:
        """Record the time from the placement of a request to its success."""
        self._ended = min(self._ended + 1, _AVERAGED)
        self._request_s += (request_s - self._request_s) / self._ended

    def refusal(self, queue: FairQueue[W], call: W) -> Refusal | None:
        """Return the refusal of a queued call that would wait too long, or None if it may wait.

        Requests that were admitted before may wait until their deadline.
        """
        left_s = call.deadline - self._now
        if left_s <= 0:
            return self.queue_full_error(
                queue, call, "no worker has capacity, and the request has no time left to wait"
            )
        if call.admitted or self._wait_s(queue, call) <= min(self.limit_s, left_s):
            return None
        tokens = queue.cost_before(call)
        return self.queue_full_error(
            queue,
            call,
            f"the request would wait too long: {tokens:.0f} tokens are ahead of it in the queue",
        )

    def queue_full_error(self, queue: FairQueue[W], call: W, reason: str) -> Refusal:
        """Return the refusal of a queued call, with the predicted wait as ``Retry-After``."""
        wait_s = min(self._wait_s(queue, call), _MAX_RETRY_AFTER_S)
        return Refusal(ErrorCode.QUEUE_FULL, reason, retry_after_s=math.ceil(wait_s) or None)

    def _wait_s(self, queue: FairQueue[W], call: W) -> float:
        """Return the predicted wait of a call, in seconds.

        It is at least the time that calls of the same tenant ahead of it, for the same model, have
        waited already.
        """
        rate = self._placed.per_s
        tokens = queue.cost_before(call)
        predicted_s = tokens / rate if rate else 0.0
        earliest = queue.earliest_ahead(
            call, lambda other: other.request.model == call.request.model
        )
        return max([predicted_s, *(self._now - other.arrived for other in earliest)])
