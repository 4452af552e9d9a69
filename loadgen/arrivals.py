"""When requests are sent: absolute times, drawn from a seed before the run.

Open loop: nothing that happens in a run moves a time. Each process is an endless line of times, in
seconds after the start; a plan cuts it by number or by duration.
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
        """Seconds after the start, in order."""
        ...


@dataclass(frozen=True)
class Gamma:
    """Independent gaps of mean 1 / ``rate``, gamma distributed with shape ``burstiness``: 1 is a
    Poisson process, less comes in bursts, more is more even. A gap's coefficient of variation is
    1 / sqrt(burstiness)."""

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
    """``rate`` requests a second, each independent of all others."""

    rate: float

    def times(self, seed: int) -> Iterator[float]:
        return Gamma(self.rate).times(seed)

    def __post_init__(self) -> None:
        _positive(rate=self.rate)


@dataclass(frozen=True)
class Constant:
    """A request every 1 / ``rate`` seconds, the first at 0."""

    rate: float

    def __post_init__(self) -> None:
        _positive(rate=self.rate)

    def times(self, seed: int) -> Iterator[float]:
        del seed
        return (number / self.rate for number in count())


@dataclass(frozen=True)
class Ramp:
    """A Poisson process whose rate goes from ``rate`` to ``to_rate`` in ``duration_s``, and stays.

    The n-th time is where the expected number of requests, ``rate t + (to_rate - rate) t² / (2
    duration_s)``, reaches the n-th time of a process of rate 1.
    """

    rate: float
    to_rate: float
    duration_s: float

    def __post_init__(self) -> None:
        _positive(rate=self.rate, to_rate=self.to_rate, duration_s=self.duration_s)

    def times(self, seed: int) -> Iterator[float]:
        slope = (self.to_rate - self.rate) / self.duration_s
        in_all = (self.rate + self.to_rate) / 2 * self.duration_s
        for expected in Poisson(1.0).times(seed):
            if expected >= in_all:
                yield self.duration_s + (expected - in_all) / self.to_rate
            else:  # the root of the quadratic that stays right when the slope is 0
                root = math.sqrt(self.rate**2 + 2 * slope * expected)
                yield 2 * expected / (self.rate + root)


@dataclass(frozen=True)
class Trace:
    """Times as they were, ``speed`` times as fast; the first is 0."""

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
            raise UsageError(f"{name} is {value}: a number above 0 is needed")
