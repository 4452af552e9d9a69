"""From where to where an axis goes, and what is written along it."""

import math
from dataclasses import dataclass
from typing import Self

from matplotlib.axes import Axes

from loadgen.report.number import tick

_LOG_FROM = 20.0
"""Values that differ by more are shown on a logarithmic axis, where that is asked for."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOST_DECADES = 6


@dataclass(frozen=True)
class Scale:
    """An axis: its ends, its few ticks, and whether it is logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    @classmethod
    def linear(cls, high: float, *, ticks: int = 5) -> Self:
        """From 0 to a little more than ``high``; of nothing, to 1."""
        high = high if high > 0 else 1.0
        least = high / ticks
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * one for one in _STEPS if power * one >= least * (1 - 1e-9))
        last = math.floor(high / step + 1e-9)
        return cls(0.0, high * 1.04, tuple(step * n for n in range(last + 1)))

    @classmethod
    def logarithmic(cls, low: float, high: float) -> Self:
        """Decades are written; 1, 2 and 5 of each where they are few."""
        low, high = low / 1.15, high * 1.15
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        between = (1, 2, 5) if high / low < 110 else (1,)
        every = math.ceil((last - first) / _MOST_DECADES)
        ticks = (n * 10.0**power for power in range(first, last + 1, every) for n in between)
        return cls(low, high, tuple(at for at in ticks if low <= at <= high), is_log=True)

    @classmethod
    def fitting(cls, low: float, high: float) -> Self:
        """Logarithmic where the values differ much; else from 0."""
        if low > 0 and high / low > _LOG_FROM:
            return cls.logarithmic(low, high)
        return cls.linear(high)

    @classmethod
    def percentages(cls) -> Self:
        return cls(0.0, 102.0, (0.0, 25.0, 50.0, 75.0, 100.0))

    @property
    def told(self) -> str:
        """To be said behind an axis' label."""
        return ", log scale" if self.is_log else ""

    def along_x(self, axes: Axes, *, labels: bool = True) -> None:
        axes.set_xscale("log" if self.is_log else "linear")
        axes.set_xlim(self.low, self.high)
        axes.set_xticks(self.ticks, [tick(at) if labels else "" for at in self.ticks])
        axes.set_xticks([], minor=True)

    def along_y(self, axes: Axes) -> None:
        axes.set_yscale("log" if self.is_log else "linear")
        axes.set_ylim(self.low, self.high)
        axes.set_yticks(self.ticks, [tick(at) for at in self.ticks])
        axes.set_yticks([], minor=True)
