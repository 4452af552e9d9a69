"""Arrival processes: absolute send times, drawn from a seed before the run.

The load is open loop: nothing that happens during a run changes a send time. A process yields an
endless sequence of times in seconds after the start. The schedule cuts the sequence off after a
number of requests or a duration.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from loadgen.errors import UsageError


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, seed: int) -> Iterator[float]:
        """Yield send times in seconds after the start, in increasing order."""
        ...


@dataclass(frozen=True)
class Gamma:
    """Independent gamma-distributed gaps with mean 1 / ``rate`` and shape ``burstiness``.

    A shape of 1 is a Poisson process. A smaller shape gives burstier arrivals, a larger shape more
    regular ones. The coefficient of variation of a gap is 1 / sqrt(burstiness).
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        _positive(rate=self.rate, burstiness=self.burstiness)

    def times(self, seed: int) -> Iterator[float]:
        draws = np.random.default_rng(seed)
        at = 0.0
        while True:
            at += float(draws.gamma(self.burstiness, 1 / (self.rate * self.burstiness)))
            yield at


@dataclass(frozen=True)
class Poisson:
    """Poisson process with ``rate`` requests per second."""

    rate: float

    def times(self, seed: int) -> Iterator[float]:
        return Gamma(self.rate).times(seed)

    def __post_init__(self) -> None:
        _positive(rate=self.rate)


@dataclass(frozen=True)
class Constant:
    """One request every 1 / ``rate`` seconds, the first at 0."""

    rate: float

    def __post_init__(self) -> None:
        _positive(rate=self.rate)

    def times(self, seed: int) -> Iterator[float]:
        del seed
        return (number / self.rate for number in count())


@dataclass(frozen=True)
class Ramp:
    """Poisson process whose rate changes linearly from ``rate`` to ``to_rate``.

    The change takes ``duration_s`` seconds; the rate stays at ``to_rate`` afterwards.

    During the change, the n-th time t solves
    ``rate t + (to_rate - rate) t² / (2 duration_s) = s_n``. The left side is the expected number of
    requests until t, and s_n is the n-th time of a Poisson process with rate 1.
    """

    rate: float
    to_rate: float
    duration_s: float

    def __post_init__(self) -> None:
        _positive(rate=self.rate, to_rate=self.to_rate, duration_s=self.duration_s)

    def times(self, seed: int) -> Iterator[float]:
        slope = (self.to_rate - self.rate) / self.duration_s
        total = (self.rate + self.to_rate) / 2 * self.duration_s
        for expected in Poisson(1.0).times(seed):
            if expected >= total:
                yield self.duration_s + (expected - total) / self.to_rate
            else:  # this form of the root is also valid for slope 0
                root = math.sqrt(self.rate**2 + 2 * slope * expected)
                yield 2 * expected / (self.rate + root)


@dataclass(frozen=True)
class Trace:
    """Recorded times, replayed ``speed`` times as fast and shifted to start at 0."""

    recorded: Sequence[float]
    speed: float = 1.0

    def __post_init__(self) -> None:
        _positive(speed=self.speed)

    def times(self, seed: int) -> Iterator[float]:
        del seed
        ordered = sorted(self.recorded)
        return ((at - ordered[0]) / self.speed for at in ordered)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{name} must be above 0, not {value}")
