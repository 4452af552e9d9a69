"""Distributions of prompt and answer lengths, in the notation of `headrace-loadgen`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Self

from services.common.errors import SettingsError

POINTS = 1000
"""Quantiles that represent a distribution."""

_FORMS = "fixed:TOKENS, uniform:LOW,HIGH or lognormal:MEAN,SIGMA, or a mix: 0.7*FORM+0.3*FORM"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens.

    Attributes:
        spec: the parsed text.
        points: quantiles with equal probability each, in ascending order.
    """

    spec: str
    points: tuple[float, ...]

    @classmethod
    def parse(cls, spec: str) -> Self:
        """Parse ``fixed:512``, ``uniform:10,100``, ``lognormal:1000,0.6`` or a weighted sum.

        Raises:
            SettingsError: if the form is unknown or a number is out of range.
        """
        try:
            parts = [_part(text) for text in spec.split("+")]
        except ValueError:
            raise SettingsError(f"{spec!r} is not a distribution of lengths: {_FORMS}") from None
        total = sum(weight for weight, _ in parts)
        points = [
            quantile((at + 0.5) / count)
            for weight, quantile in parts
            for count in [max(1, round(POINTS * weight / total))]
            for at in range(count)
        ]
        return cls(spec, tuple(sorted(max(1.0, point) for point in points)))

    @property
    def mean(self) -> float:
        return fmean(self.points)

    @property
    def mean_square(self) -> float:
        return fmean(point * point for point in self.points)

    def quantile(self, share: float) -> float:
        """Return the length that a ``share`` of the requests does not exceed, 0 < share < 1."""
        return self.points[math.ceil(share * len(self.points)) - 1]


def _part(text: str) -> tuple[float, Callable[[float], float]]:
    """Return the weight and the quantile function of one term of a mix."""
    weight, star, form = text.strip().rpartition("*")
    share = float(weight) if star else 1.0
    name, _, numbers = form.partition(":")
    values = [float(number) for number in numbers.split(",")]
    if not math.isfinite(share) or share <= 0 or not all(map(math.isfinite, values)):
        raise ValueError(text)
    match name, values:
        case "fixed", [tokens] if tokens >= 1:
            return share, lambda _: tokens
        case "uniform", [low, high] if 1 <= low <= high:
            return share, lambda at: low + at * (high - low)
        case "lognormal", [mean, sigma] if mean >= 1 and sigma > 0:
            median = mean * math.exp(-sigma * sigma / 2)
            normal = NormalDist()
            return share, lambda at: median * math.exp(sigma * normal.inv_cdf(at))
    raise ValueError(text)
