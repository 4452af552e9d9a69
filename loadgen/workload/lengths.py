"""Length distributions, in tokens.

Lengths are integers and at least 1. Draws from continuous distributions are rounded stochastically,
so that rounding does not change the mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import UsageError

IntArray = NDArray[np.int64]

MAX_TOKENS = 10_000_000
"""Maximum length; a larger one is refused as a probable typing error."""


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    @property
    def mean(self) -> float:
        """Expected length."""
        ...

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw ``count`` independent lengths, each at least 1. Shape (count,)."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Constant length."""

    tokens: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.tokens <= MAX_TOKENS, f"length must be 1 to {MAX_TOKENS}, not {self.tokens}"
        )

    @property
    def mean(self) -> float:
        return float(self.tokens)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:  # noqa: ARG002
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Discrete uniform distribution from ``low`` to ``high``, both inclusive."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.low <= self.high <= MAX_TOKENS,
            f"lengths from {self.low} to {self.high}: 1 ≤ low ≤ high ≤ {MAX_TOKENS} is needed",
        )

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        return rng.integers(self.low, self.high, size=count, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal distribution, without an upper bound.

    Attributes:
        mean: mean of the lengths, not of their logarithms. The median is ``mean / exp(sigma²/2)``.
            Draws below 1 become 1, which raises a mean that is close to 1.
        sigma: standard deviation of the natural logarithm of the lengths, 0 to 3.
    """

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        _require(1 <= self.mean <= MAX_TOKENS, f"mean must be 1 to {MAX_TOKENS}, not {self.mean:g}")
        _require(0 <= self.sigma <= 3, f"sigma must be 0 to 3, not {self.sigma:g}")

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        median = math.log(self.mean) - self.sigma**2 / 2
        return np.maximum(_round(rng.lognormal(median, self.sigma, count), rng), 1)


@dataclass(frozen=True, slots=True)
class Bounded:
    """Distribution with a given minimum, mean and maximum, as papers report them for datasets.

    It is a beta distribution scaled to ``low`` to ``high`` with α + β = 6, as in PERT. It has a
    single mode, and its density decreases towards both bounds. If a bound is closer to the
    mean than a sixth of the range, that bound is the mode.
    """

    low: int
    mean: float
    high: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.low <= self.mean <= self.high <= MAX_TOKENS,
            f"lengths from {self.low} to {self.high} with a mean of {self.mean:g}: "
            f"1 ≤ low ≤ mean ≤ high ≤ {MAX_TOKENS} is needed",
        )

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        if self.mean in (self.low, self.high):
            return np.full(count, int(self.mean), dtype=np.int64)
        span = self.high - self.low
        share = (self.mean - self.low) / span
        stretched = self.low + span * rng.beta(6 * share, 6 * (1 - share), count)
        return np.minimum(_round(stretched, rng), self.high)

    def scaled(self, factor: float) -> "Bounded":
        """Return the distribution with mean and bounds multiplied by ``factor``.

        Results below 1 become 1, and bounds are rounded outwards.

        Raises:
            UsageError: if the factor is not above 0, or a length exceeds `MAX_TOKENS`.
        """
        _require(0 < factor < math.inf, f"scale must be above 0, not {factor:g}")
        return Bounded(
            max(1, math.floor(self.low * factor)),
            max(1.0, self.mean * factor),
            max(1, math.ceil(self.high * factor)),
        )


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution.

    ``fixed:TOKENS``, ``uniform:LOW,HIGH``, ``lognormal:MEAN,SIGMA`` or ``bounded:LOW,MEAN,HIGH``.

    Raises:
        UsageError: if the syntax is wrong or a parameter is out of range.
    """
    kind, _, rest = text.partition(":")
    form = _FORMS.get(kind.strip())
    if form is None:
        raise UsageError(f"{text!r} is not a length distribution; expected {_USAGE}")
    usage, count, make = form
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise UsageError(f"{text!r} does not match {usage}")
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


def _round(lengths: NDArray[np.float64], rng: np.random.Generator) -> IntArray:
    return np.floor(lengths + rng.random(lengths.shape)).astype(np.int64)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
