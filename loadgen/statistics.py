"""What is said of many numbers, and how sure it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy import stats

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
LEVEL = 0.95
"""Of intervals."""
_DRAWS = 200
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """Of some numbers; ``percentiles`` of `PERCENTILES`, interpolated between neighbours."""

    count: int
    mean: float
    deviation: float
    least: float
    most: float
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None of none."""
        if not len(values):
            return None
        numbers = np.asarray(values, dtype=np.float64)
        return cls(
            count=len(numbers),
            mean=float(numbers.mean()),
            deviation=float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0,
            least=float(numbers.min()),
            most=float(numbers.max()),
            percentiles=tuple(map(float, np.percentile(numbers, PERCENTILES))),
        )

    def percentile(self, which: float) -> float:
        """One of `PERCENTILES`."""
        return self.percentiles[PERCENTILES.index(which)]


@dataclass(frozen=True)
class Interval:
    """A mean of independent runs, and where the true one is, at ``level``: Student's t."""

    mean: float
    low: float
    high: float
    runs: int
    level: float

    @classmethod
    def of(cls, values: Sequence[float], level: float = LEVEL) -> Self:
        """Of one run nothing is known: the interval is the whole line."""
        numbers = np.asarray(values, dtype=np.float64)
        mean, runs = float(numbers.mean()), len(numbers)
        if runs < 2:
            return cls(mean, float("-inf"), float("inf"), runs, level)
        error = float(stats.sem(numbers)) * float(stats.t.ppf((1 + level) / 2, runs - 1))
        return cls(mean, mean - error, mean + error, runs, level)

    def within(self, least: float, most: float) -> "Interval":
        """The part of it where the true mean can be: rates are not negative, shares at most 1."""
        if math.isinf(self.high):
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))

    def as_json(self) -> dict[str, Any]:
        """``low`` and ``high`` are None where nothing is known of them."""
        low, high = (one if math.isfinite(one) else None for one in (self.low, self.high))
        return vars(self) | {"low": low, "high": high}


def ratio_of(a: Sequence[float], b: Sequence[float], *, paired: bool) -> Interval | None:
    """b over a, geometric means of runs: Student's t of the logarithms, of pairs of runs or, by
    Welch, of independent ones. None where a number is not above 0."""
    if min(*a, *b) <= 0:
        return None
    logs = np.log(np.asarray(a, dtype=np.float64)), np.log(np.asarray(b, dtype=np.float64))
    if paired:
        found = Interval.of(list(logs[1] - logs[0]))
        return _exponential(found.mean, found.low, found.high, found.runs)
    mean = float(logs[1].mean() - logs[0].mean())
    if min(len(a), len(b)) < 2:
        return _exponential(mean, -math.inf, math.inf, 1)
    errors = [float(one.var(ddof=1)) / len(one) for one in logs]
    freedom = (
        sum(errors) ** 2
        / sum(error**2 / (len(one) - 1) for error, one in zip(errors, logs, strict=True))
        if sum(errors)
        else math.inf
    )
    error = math.sqrt(sum(errors)) * float(stats.t.ppf((1 + LEVEL) / 2, freedom))
    return _exponential(mean, mean - error, mean + error, min(len(a), len(b)))


def _exponential(mean: float, low: float, high: float, runs: int) -> Interval:
    low, high = (math.exp(one) if math.isfinite(one) else one for one in (low, high))
    return Interval(math.exp(mean), low, high, runs, LEVEL)


def resampled(groups: Sequence[Sequence[float]], statistic: str, seed: int = 0) -> Numbers:
    """What a statistic of one run could as well have been: of requests drawn with replacement,
    `_DRAWS` times. It takes requests to be independent, which those of one run are not quite.

    Args:
        groups: each request's numbers.
        statistic: ``mean``, or a percentile such as ``p99``.
    """
    values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups])
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values)
    values, owners = values[order], owners[order]
    draws = np.random.default_rng(seed)
    found = np.empty(_DRAWS)
    for number in range(_DRAWS):
        drawn = np.bincount(draws.integers(len(groups), size=len(groups)), minlength=len(groups))
        up_to = np.cumsum(drawn[owners])
        if statistic == "mean":
            found[number] = (values * drawn[owners]).sum() / up_to[-1]
        else:
            rank = float(statistic.removeprefix("p")) / 100 * up_to[-1]
            found[number] = values[min(int(np.searchsorted(up_to, rank)), len(values) - 1)]
    return found


def interval_of(mean: float, draws: Numbers) -> Interval:
    """Of one run, by what it could as well have been."""
    low, high = np.percentile(draws, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Interval(mean, float(low), float(high), 1, LEVEL)
