"""What is said of many numbers, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy import stats

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


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
    def of(cls, values: Sequence[float], level: float = 0.95) -> Self:
        """Of one run nothing is known: the interval is the whole line."""
        numbers = np.asarray(values, dtype=np.float64)
        mean, runs = float(numbers.mean()), len(numbers)
        if runs < 2:
            return cls(mean, float("-inf"), float("inf"), runs, level)
        error = float(stats.sem(numbers)) * float(stats.t.ppf((1 + level) / 2, runs - 1))
        return cls(mean, mean - error, mean + error, runs, level)
