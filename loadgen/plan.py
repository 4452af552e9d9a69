"""A run before it begins: what is sent when, and what of it is left early."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np

from loadgen.arrivals import Arrivals, Trace
from loadgen.errors import UsageError
from loadgen.workload.base import Ask, Workload

_ARRIVALS, _CANCELLATIONS = 1, 2  # seeds of their own: one setting does not move another's draws


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: what, when, and after how many tokens its client leaves; None: it stays."""

    ask: Ask
    due: float
    leaves_after: int | None = None


@dataclass(frozen=True)
class Bounds:
    """How long a run is: so many requests, so many seconds, or whatever ends first."""

    requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise UsageError("a run needs a number of requests or a duration")


def plan(
    arrivals: Arrivals | None,
    workload: Workload,
    bounds: Bounds,
    *,
    seed: int,
    cancelled: float = 0.0,
    speed: float = 1.0,
) -> list[Planned]:
    """All requests of a run, in the order of their times.

    Args:
        arrivals: None takes the times of a trace, ``speed`` times as fast.
        cancelled: the share of requests whose clients leave, each after a number of tokens drawn
            from 1 to one less than it asked for.

    Raises:
        UsageError: the workload has no times, or nothing is left within the bounds.
    """
    asks = workload.asks(seed)
    if arrivals is None:
        kept = list(islice(asks, bounds.requests))
        recorded = [ask.at for ask in kept if ask.at is not None]
        if len(recorded) < len(kept):
            raise UsageError("arrivals of a trace need a workload with times")
        kept.sort(key=lambda ask: ask.at or 0.0)
        pairs: Iterator[tuple[Ask, float]] = zip(kept, Trace(recorded, speed).times(0), strict=True)
    else:
        pairs = zip(asks, arrivals.times(_seed(seed, _ARRIVALS)), strict=False)
    if bounds.duration_s is not None:
        limit = bounds.duration_s
        pairs = takewhile(lambda pair: pair[1] < limit, pairs)
    draws = np.random.default_rng(_seed(seed, _CANCELLATIONS))
    planned = [
        Planned(ask, due, _leaves(draws, ask, cancelled))
        for ask, due in islice(pairs, bounds.requests)
    ]
    if not planned:
        raise UsageError("no request is due within the bounds of the run")
    return planned


def _leaves(draws: np.random.Generator, ask: Ask, cancelled: float) -> int | None:
    leaves, after = draws.random(2)
    if leaves >= cancelled or ask.output_tokens < 2:
        return None
    return 1 + int(after * (ask.output_tokens - 1))


def _seed(seed: int, purpose: int) -> int:
    return int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0])
