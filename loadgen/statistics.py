"""Distributions and confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
LEVEL = 0.95
"""Confidence level."""
_RESAMPLES = 200
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """Summary of a sample, with `PERCENTILES` interpolated linearly between neighbours."""

    count: int
    mean: float
    deviation: float
    minimum: float
    maximum: float
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Return the distribution, or None if there are no values."""
        if not len(values):
            return None
        numbers = np.asarray(values, dtype=np.float64)
        return cls(
            count=len(numbers),
            mean=float(numbers.mean()),
            deviation=float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0,
            minimum=float(numbers.min()),
            maximum=float(numbers.max()),
            percentiles=tuple(map(float, np.percentile(numbers, PERCENTILES))),
        )

    def percentile(self, which: float) -> float:
        """Return one of `PERCENTILES`."""
        return self.percentiles[PERCENTILES.index(which)]


@dataclass(frozen=True)
class Interval:
    """Mean of independent runs with its confidence interval by Student's t distribution."""

    mean: float
    low: float
    high: float
    runs: int
    level: float

    @classmethod
    def of(cls, values: Sequence[float], level: float = LEVEL) -> Self:
        """Return the interval of the mean of ``values``; for a single value, it is infinite."""
        numbers = np.asarray(values, dtype=np.float64)
        mean = float(numbers.mean())
        runs = len(numbers)
        if runs < 2:
            return cls(mean, float("-inf"), float("inf"), runs, level)
        error = _standard_error(numbers) * _t_quantile(level, runs - 1)
        return cls(mean, mean - error, mean + error, runs, level)

    def clipped(self, lower: float, upper: float) -> "Interval":
        """Return the interval clipped to the possible values, such as 0 to 1 for a fraction."""
        if math.isinf(self.high):
            return self
        return replace(self, low=max(self.low, lower), high=min(self.high, upper))

    def as_json(self) -> dict[str, Any]:
        """Return the fields; infinite ends become None."""
        low, high = (one if math.isfinite(one) else None for one in (self.low, self.high))
        return vars(self) | {"low": low, "high": high}


def ratio_interval(a: Sequence[float], b: Sequence[float], *, paired: bool) -> Interval | None:
    """Return the ratio b / a of geometric means of runs, or None if a value is not above 0.

    The confidence interval is computed on logarithms: by Student's t for the differences of pairs
    if ``paired``, else by Welch's t for independent samples.
    """
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
    error = math.sqrt(sum(errors)) * _t_quantile(LEVEL, freedom)
    return _exponential(mean, mean - error, mean + error, min(len(a), len(b)))


def _standard_error(numbers: Numbers) -> float:
    from scipy import stats  # in the loadgen extra

    return float(stats.sem(numbers))


def _t_quantile(level: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t distribution."""
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, freedom))


def _exponential(mean: float, low: float, high: float, runs: int) -> Interval:
    low, high = (math.exp(one) if math.isfinite(one) else one for one in (low, high))
    return Interval(math.exp(mean), low, high, runs, LEVEL)


def bootstrap(groups: Sequence[Sequence[float]], statistic: str, seed: int = 0) -> Numbers:
    """Return bootstrap samples of a statistic of one run, resampling whole requests.

    Requests are treated as independent, although requests of one run are so only approximately.

    Args:
        groups: one sequence per request, with its values of the measure.
        statistic: ``mean``, or a percentile such as ``p99``.

    Returns:
        `_RESAMPLES` values, shape (_RESAMPLES,).
    """
    values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups])
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values)
    values, owners = values[order], owners[order]
    draws = np.random.default_rng(seed)
    found = np.empty(_RESAMPLES)
    for number in range(_RESAMPLES):
        drawn = np.bincount(draws.integers(len(groups), size=len(groups)), minlength=len(groups))
        up_to = np.cumsum(drawn[owners])
        if statistic == "mean":
            found[number] = (values * drawn[owners]).sum() / up_to[-1]
        else:
            rank = float(statistic.removeprefix("p")) / 100 * up_to[-1]
            found[number] = values[min(int(np.searchsorted(up_to, rank)), len(values) - 1)]
    return found


def bootstrap_interval(mean: float, draws: Numbers) -> Interval:
    """Return the bootstrap percentile interval of one run.

    Args:
        mean: value computed from the original sample.
        draws: bootstrap samples.
    """
    low, high = np.percentile(draws, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Interval(mean, float(low), float(high), 1, LEVEL)
