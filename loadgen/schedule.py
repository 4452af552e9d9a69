"""The request schedule: all requests of a run with their send times, made before the run starts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, takewhile

import numpy as np

from loadgen.arrivals import Arrivals, Trace
from loadgen.errors import UsageError
from loadgen.workload.base import RequestSpec, Workload

INSTANT_S = 1e-9
"""Seconds added to a time up to and including which requests are measured."""
_ARRIVALS, _CANCELLATIONS = 1, 2
"""Numbers from which separate seeds are derived, so that cancellations do not change arrivals."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of the schedule.

    Attributes:
        spec: prompt and lengths.
        due: send time, in seconds after the start of the run.
        cancel_after: number of tokens after which the client disconnects; None if it does not.
        cancel_at_s: seconds after the send at which the client disconnects; None if it does not.
    """

    spec: RequestSpec
    due: float
    cancel_after: int | None = None
    cancel_at_s: float | None = None


@dataclass(frozen=True)
class Cancellations:
    """Which requests the client cancels, and when.

    Attributes:
        fraction: fraction of the requests that are cancelled.
        within_s: a request is cancelled at a uniform time up to so many seconds after its send, if
            it has not ended by then; if None, after a uniform number of tokens, from 1 to one less
            than the requested output length.

    Raises:
        UsageError: if ``within_s`` is not positive.
    """

    fraction: float = 0.0
    within_s: float | None = None

    def __post_init__(self) -> None:
        if self.within_s is not None and not self.within_s > 0:
            raise UsageError("--cancel-within must be more than 0 seconds")


@dataclass(frozen=True)
class Limits:
    """Length of a run: a number of requests, a duration, or both; the first limit reached ends it.

    Attributes:
        requests: maximum number of requests; of chats, if requests are turns of chats.
        duration_s: seconds after which nothing is sent.

    Raises:
        UsageError: if neither limit is given, or the duration is not a positive number.
    """

    requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise UsageError(
                "a run needs a number of requests or a duration: --requests, --duration"
            )
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise UsageError(f"--duration must be finite and above 0, not {self.duration_s}")


@dataclass(frozen=True)
class Schedule:
    """All requests of a run.

    Attributes:
        requests: requests, ordered by send time.
        end: time at which the load ends, in seconds after the start: when the request after the
            last one would be due, but not after the duration. Requests divided by this time are the
            rate of the arrival process, even for a single request. A trace, which has no next
            request, ends with its last one.
    """

    requests: list[ScheduledRequest]
    end: float


def make_schedule(
    arrivals: Arrivals | None,
    workload: Workload,
    limits: Limits,
    *,
    seed: int,
    cancellations: Cancellations = Cancellations(),
    speed: float = 1.0,
) -> Schedule:
    """Return all requests of a run.

    Args:
        arrivals: arrival process; if None, the workload's trace gives the times.
        speed: replay speed of a trace.

    Raises:
        UsageError: if a trace was requested and the workload has no times, or no request is due
            within the limits.
    """
    specs: Iterator[RequestSpec] = islice(workload.requests(seed), limits.requests)
    if arrivals is None:
        specs, times = _replayed(specs, speed)
    else:
        times = arrivals.times(_seed(seed, _ARRIVALS))
    duration_s = math.inf if limits.duration_s is None else limits.duration_s
    pairs = takewhile(lambda pair: pair[1] < duration_s, zip(specs, times, strict=False))
    requests = list(_scheduled(pairs, seed, cancellations))
    if not requests:
        raise UsageError(
            "no request is due within the limits of the run; raise --duration or --rate"
        )
    return Schedule(requests, min(duration_s, next(times)))


def _replayed(
    specs: Iterator[RequestSpec], speed: float
) -> tuple[Iterator[RequestSpec], Iterator[float]]:
    """Return the requests of a trace in the order of their times, and these times and the end."""
    kept = list(specs)
    recorded = [spec.at for spec in kept if spec.at is not None]
    if len(recorded) < len(kept):
        raise UsageError("trace arrivals need a workload with times: --file with timestamps")
    kept.sort(key=lambda spec: spec.at or 0.0)
    times = list(Trace(recorded, speed).times(0))
    return iter(kept), chain(times, [max(times, default=0.0) + INSTANT_S])


def make_requests(
    workload: Workload, limits: Limits, *, seed: int, cancellations: Cancellations = Cancellations()
) -> Iterator[ScheduledRequest]:
    """Yield the requests of a closed loop, which have no send time: ``due`` is 0.

    Request i is request i of `make_schedule` with the same seed and any arrival process except a
    trace. The requests are prepared when they are drawn.
    """
    specs = islice(workload.requests(seed), limits.requests)
    return _scheduled(((spec, 0.0) for spec in specs), seed, cancellations)


def _scheduled(
    pairs: Iterator[tuple[RequestSpec, float]], seed: int, cancellations: Cancellations
) -> Iterator[ScheduledRequest]:
    draws = np.random.default_rng(_seed(seed, _CANCELLATIONS))
    for spec, due in pairs:
        cancels, after = draws.random(2)
        if cancels >= cancellations.fraction:
            yield ScheduledRequest(spec, due)
        elif cancellations.within_s is not None:
            yield ScheduledRequest(spec, due, cancel_at_s=after * cancellations.within_s)
        elif spec.output_tokens > 1:
            yield ScheduledRequest(spec, due, 1 + int(after * (spec.output_tokens - 1)))
        else:
            yield ScheduledRequest(spec, due)


def _seed(seed: int, purpose: int) -> int:
    return int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0])
