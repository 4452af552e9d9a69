"""Distributions of lengths, in tokens.

Lengths are whole and at least 1. Where a distribution is continuous, a draw is rounded up or down
at random in proportion to its fraction, so that rounding does not move the mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import UsageError

IntArray = NDArray[np.int64]

LONGEST = 10_000_000
"""Tokens; what is asked for beyond it is a slip of the keyboard."""


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    @property
    def mean(self) -> float:
        """The expected length."""
        ...

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """``count`` independent lengths, each at least 1. Shape (count,)."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        _require(1 <= self.tokens <= LONGEST, f"a length is 1 to {LONGEST}, not {self.tokens}")

    @property
    def mean(self) -> float:
        return float(self.tokens)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:  # noqa: ARG002
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each length from ``low`` to ``high`` alike, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.low <= self.high <= LONGEST,
            f"lengths from {self.low} to {self.high}: 1 ≤ low ≤ high ≤ {LONGEST} is needed",
        )

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        return rng.integers(self.low, self.high, size=count, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Mostly short, some much longer.

    Attributes:
        mean: of the lengths themselves, not of their logarithms: the load it makes is known
            without arithmetic. The median is ``mean / exp(sigma²/2)``. Draws below 1 become 1,
            which raises the mean where it is itself near 1.
        sigma: standard deviation of the natural logarithm of the lengths, 0 to 3. There is no
            longest length; `Bounded` has one.
    """

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        _require(1 <= self.mean <= LONGEST, f"a mean is 1 to {LONGEST}, not {self.mean:g}")
        _require(0 <= self.sigma <= 3, f"sigma is 0 to 3, not {self.sigma:g}")

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        median = math.log(self.mean) - self.sigma**2 / 2
        return np.maximum(_whole(rng.lognormal(median, self.sigma, count), rng), 1)


@dataclass(frozen=True, slots=True)
class Bounded:
    """A mean and its bounds, which is all that papers tell of their datasets.

    A beta distribution stretched over ``low`` to ``high``. Of the shapes with that mean it takes
    α + β = 6, as PERT estimates do: a single smooth hump that thins out towards both bounds,
    unless the mean lies in the outer sixth of the range; then the bound beside it is likeliest.
    """

    low: int
    mean: float
    high: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.low <= self.mean <= self.high <= LONGEST,
            f"lengths from {self.low} to {self.high} with a mean of {self.mean:g}: "
            f"1 ≤ low ≤ mean ≤ high ≤ {LONGEST} is needed",
        )

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        if self.mean in (self.low, self.high):
            return np.full(count, int(self.mean), dtype=np.int64)
        span = self.high - self.low
        share = (self.mean - self.low) / span
        stretched = self.low + span * rng.beta(6 * share, 6 * (1 - share), count)
        return np.minimum(_whole(stretched, rng), self.high)

    def scaled(self, factor: float) -> "Bounded":
        """All three times ``factor``, at least 1, the bounds rounded outwards.

        Raises:
            UsageError: the factor is not above 0, or makes the lengths longer than `LONGEST`.
        """
        _require(0 < factor < math.inf, f"a scale is a number above 0, not {factor:g}")
        return Bounded(
            max(1, math.floor(self.low * factor)),
            max(1.0, self.mean * factor),
            max(1, math.ceil(self.high * factor)),
        )


def parse_lengths(text: str) -> Lengths:
    """The distribution that a user writes as one word.

    ``fixed:TOKENS``, ``uniform:LOW,HIGH``, ``lognormal:MEAN,SIGMA`` or ``bounded:LOW,MEAN,HIGH``.

    Raises:
        UsageError: it is none of these, or its numbers do not fit.
    """
    kind, _, rest = text.partition(":")
    form = _FORMS.get(kind.strip())
    if form is None:
        raise UsageError(f"{text!r} is no distribution of lengths; write {_USAGE}")
    usage, count, make = form
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise UsageError(f"{text!r} does not read {usage}")
    try:
        return make(*numbers)
    except UsageError as error:
        raise UsageError(f"{text!r}: {error}") from None


_FORMS: dict[str, tuple[str, int, Callable[..., Lengths]]] = {
    "fixed": ("fixed:TOKENS", 1, lambda n: Fixed(_tokens(n))),
    "uniform": ("uniform:LOW,HIGH", 2, lambda low, high: Uniform(_tokens(low), _tokens(high))),
    "lognormal": ("lognormal:MEAN,SIGMA", 2, Lognormal),
    "bounded": (
        "bounded:LOW,MEAN,HIGH",
        3,
        lambda low, mean, high: Bounded(_tokens(low), mean, _tokens(high)),
    ),
}
_USAGE = ", ".join(usage for usage, _, _ in _FORMS.values())


def _tokens(number: float) -> int:
    _require(number.is_integer(), f"{number:g} is not a whole number of tokens")
    return int(number)


def _whole(lengths: NDArray[np.float64], rng: np.random.Generator) -> IntArray:
    return np.floor(lengths + rng.random(lengths.shape)).astype(np.int64)


def _require(holds: bool, why_not: str) -> None:
    if not holds:
        raise UsageError(why_not)
