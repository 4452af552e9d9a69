"""The request schedule: all requests of a run with their send times, made before the run starts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np

from loadgen.arrivals import Arrivals, Trace
from loadgen.errors import UsageError
from loadgen.workload.base import RequestSpec, Workload

_ARRIVALS, _CANCELLATIONS = 1, 2  # separate seeds, so that cancellations do not change arrivals


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of the schedule.

    Attributes:
        spec: prompt and lengths.
        due: send time, in seconds after the start of the run.
        cancel_after: number of tokens after which the client disconnects; None if it never does.
    """

    spec: RequestSpec
    due: float
    cancel_after: int | None = None


@dataclass(frozen=True)
class Limits:
    """Length of a run: a number of requests, a duration, or both; the first limit reached ends it.

    Raises:
        UsageError: if neither limit is given.
    """

    requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise UsageError(
                "a run needs a number of requests or a duration: --requests, --duration"
            )


def make_schedule(
    arrivals: Arrivals | None,
    workload: Workload,
    limits: Limits,
    *,
    seed: int,
    cancel_fraction: float = 0.0,
    speed: float = 1.0,
) -> list[ScheduledRequest]:
    """Return all requests of a run, ordered by send time.

    Args:
        arrivals: arrival process; if None, the workload's trace gives the times.
        speed: replay speed of a trace.
        cancel_fraction: fraction of requests cancelled by the client. The number of tokens before
            cancellation is uniform from 1 to one less than the requested output length.

    Raises:
        UsageError: if a trace was requested and the workload has no times, or no request is due
            within the limits.
    """
    specs = workload.requests(seed)
    if arrivals is None:
        kept = list(islice(specs, limits.requests))
        recorded = [spec.at for spec in kept if spec.at is not None]
        if len(recorded) < len(kept):
            raise UsageError("trace arrivals need a workload with times: --file with timestamps")
        kept.sort(key=lambda spec: spec.at or 0.0)
        times = Trace(recorded, speed).times(0)
        pairs: Iterator[tuple[RequestSpec, float]] = zip(kept, times, strict=True)
    else:
        pairs = zip(specs, arrivals.times(_seed(seed, _ARRIVALS)), strict=False)
    if limits.duration_s is not None:
        duration_s = limits.duration_s
        pairs = takewhile(lambda pair: pair[1] < duration_s, pairs)
    schedule = list(_scheduled(islice(pairs, limits.requests), seed, cancel_fraction))
    if not schedule:
        raise UsageError(
            "no request is due within the limits of the run; raise --duration or --rate"
        )
    return schedule


def make_requests(
    workload: Workload, limits: Limits, *, seed: int, cancel_fraction: float = 0.0
) -> Iterator[ScheduledRequest]:
    """Yield the requests of a closed loop, which have no send time: ``due`` is 0.

    Request i is request i of `make_schedule` with the same seed and any arrival process except a
    trace. The requests are prepared when they are drawn.
    """
    specs = islice(workload.requests(seed), limits.requests)
    return _scheduled(((spec, 0.0) for spec in specs), seed, cancel_fraction)


def _scheduled(
    pairs: Iterator[tuple[RequestSpec, float]], seed: int, cancel_fraction: float
) -> Iterator[ScheduledRequest]:
    draws = np.random.default_rng(_seed(seed, _CANCELLATIONS))
    for spec, due in pairs:
        yield ScheduledRequest(spec, due, _cancel_after(draws, spec, cancel_fraction))


def _cancel_after(draws: np.random.Generator, spec: RequestSpec, fraction: float) -> int | None:
    cancels, after = draws.random(2)
    if cancels >= fraction or spec.output_tokens < 2:
        return None
    return 1 + int(after * (spec.output_tokens - 1))


def _seed(seed: int, purpose: int) -> int:
    return int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0])
