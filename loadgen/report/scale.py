"""Axis scales: range and ticks."""

import math
from dataclasses import dataclass
from typing import Self

from matplotlib.axes import Axes

from loadgen.number import tick

_MIN_LOG_RATIO = 20.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MAX_DECADES = 6


@dataclass(frozen=True)
class Scale:
    """Range and ticks of an axis."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    @classmethod
    def linear(cls, high: float, *, ticks: int = 5) -> Self:
        """Return a scale from 0 to slightly above ``high``, or to 1 if ``high`` is 0."""
        high = high if high > 0 else 1.0
        min_step = high / ticks
        power = 10.0 ** math.floor(math.log10(min_step))
        step = next(power * one for one in _STEPS if power * one >= min_step * (1 - 1e-9))
        last = math.floor(high / step + 1e-9)
        return cls(0.0, high * 1.04, tuple(step * n for n in range(last + 1)))

    @classmethod
    def logarithmic(cls, low: float, high: float) -> Self:
        """Return a scale with ticks at powers of 10.

        A small range also has ticks at 2 and 5 times each power.
        """
        low, high = low / 1.15, high * 1.15
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        between = (1, 2, 5) if high / low < 110 else (1,)
        every = math.ceil((last - first) / _MAX_DECADES)
        ticks = (n * 10.0**power for power in range(first, last + 1, every) for n in between)
        return cls(low, high, tuple(at for at in ticks if low <= at <= high), is_log=True)

    @classmethod
    def fitting(cls, low: float, high: float) -> Self:
        """Return a logarithmic scale for a large range of values, else a linear one."""
        if low > 0 and high / low > _MIN_LOG_RATIO:
            return cls.logarithmic(low, high)
        return cls.linear(high)

    @classmethod
    def percentages(cls) -> Self:
        return cls(0.0, 102.0, (0.0, 25.0, 50.0, 75.0, 100.0))

    @property
    def label_suffix(self) -> str:
        """Suffix of the axis label."""
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
