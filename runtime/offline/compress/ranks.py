"""Distribute ranks over linears, from losses and parameter counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CompressionError

_BISECTIONS = 200


@dataclass(frozen=True)
class Choice:
    """A linear ``[out, inner]`` for which to choose a rank.

    Attributes:
        loss: fp64 ``[min(inner, out)]``, the loss increase from dropping each term, in descending
            order.
    """

    out: int
    inner: int
    loss: NDArray[np.float64]


def allocate_ranks(choices: Sequence[Choice], keep: float, multiple: int) -> list[int | None]:
    """Return the ranks with the least total loss for at most ``keep`` of all parameters.

    None stands for a dense linear. Ranks are multiples of ``multiple`` at which a factor pair is
    smaller than the dense weight. For a price λ per parameter, each linear independently minimizes
    loss + λ · parameters; bisection finds the lowest λ within the budget. A linear with high
    truncation losses can therefore stay dense. The optimum is exact on the convex hull of the
    choices.

    Raises:
        CompressionError: the smallest ranks exceed ``keep``.
    """
    options = [_options(choice, multiple) for choice in choices]
    budget = keep * sum(choice.out * choice.inner for choice in choices)
    if sum(option.parameters[0] for option in options) > budget:
        raise CompressionError(
            f"ranks of at least {multiple} cannot keep as little as {keep} of the parameters"
        )
    if sum(option.parameters[-1] for option in options) <= budget:
        return [None] * len(options)
    low, high = 0.0, max(float(option.loss[0]) for option in options)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(option.parameters[option.best(middle)] for option in options) <= budget:
            high = middle
        else:
            low = middle
    return [option.ranks[option.best(high)] for option in options]


def uniform_ranks(choices: Sequence[Choice], keep: float, multiple: int) -> list[int | None]:
    """Return, for each linear, the largest rank that keeps at most ``keep`` of its parameters."""
    return [_rank(choice, keep, multiple) for choice in choices]


def log_loss_ranks(
    choices: Sequence[Choice], kinds: Sequence[object], keep: float, multiple: int, tokens: int
) -> list[int | None]:
    """Return ranks as in SVD-LLM v2 (arXiv 2503.12340, section 3.1).

    Among linears of one kind, the removed fraction is proportional to 1 / log(loss). The loss is
    the norm of the output error at the uniform rank over all calibration tokens; values below e are
    raised to e. If the fraction of a linear would exceed `_MAX_REMOVED`, more parameters are
    removed from the other linears of its kind.

    Args:
        kinds: kind of each linear, such as its field.
        tokens: number of calibration tokens.
    """
    ranks: list[int | None] = [None] * len(choices)
    for kind in set(kinds):
        members = [number for number, other in enumerate(kinds) if other == kind]
        uniform = uniform_ranks([choices[number] for number in members], keep, multiple)
        dropped = [
            math.sqrt(tokens * choices[number].loss[rank or len(choices[number].loss) :].sum())
            for number, rank in zip(members, uniform, strict=True)
        ]
        weights = np.array([1 / max(1.0, math.log(max(loss, 1.0))) for loss in dropped])
        sizes = np.array([choices[number].out * choices[number].inner for number in members])
        for number, removed in zip(members, _removed(weights, sizes, 1 - keep), strict=True):
            ranks[number] = _rank(choices[number], 1 - removed, multiple)
    return ranks


_MAX_REMOVED = 0.95
"""Maximum fraction of a linear's parameters that `log_loss_ranks` removes."""


def _removed(
    weights: NDArray[np.float64], sizes: NDArray[np.int64], target: float
) -> NDArray[np.float64]:
    """Return the fractions of each linear's parameters to remove, proportional to ``weights``.

    Together they remove the fraction ``target`` of all parameters. Each is at most `_MAX_REMOVED`,
    or ``target`` if that is larger.
    """
    bound = max(_MAX_REMOVED, target)
    low, high = 0.0, bound / float(weights.min())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        removed = np.minimum(middle * weights, bound)
        low, high = (
            (middle, high) if (removed * sizes).sum() < target * sizes.sum() else (low, middle)
        )
    return np.minimum(high * weights, bound)


def _rank(choice: Choice, keep: float, multiple: int) -> int | None:
    """Return the largest allowed rank with at most ``keep`` of the parameters, or None (dense)."""
    size, cost = choice.out * choice.inner, choice.out + choice.inner
    if keep >= 1.0:
        return None
    rank = int(size * keep / cost) // multiple * multiple
    if rank < multiple:
        raise CompressionError(
            f"ranks of at least {multiple} cannot keep as little as {keep:.3f} of a linear"
        )
    return rank


@dataclass(frozen=True)
class _Options:
    """Possible ranks of one linear in ascending order; the last entry, None, keeps it dense."""

    ranks: list[int | None]
    parameters: NDArray[np.float64]
    loss: NDArray[np.float64]

    def best(self, price: float) -> int:
        """Return the index of the option with the least loss + price · parameters."""
        return int(np.argmin(self.loss + price * self.parameters))


def _options(choice: Choice, multiple: int) -> _Options:
    size, cost = choice.out * choice.inner, choice.out + choice.inner
    ranks = [rank for rank in range(multiple, len(choice.loss), multiple) if rank * cost < size]
    dropped = np.append(np.cumsum(choice.loss[::-1])[::-1], 0.0)
    return _Options(
        ranks=[*ranks, None],
        parameters=np.array([*(rank * cost for rank in ranks), size], dtype=np.float64),
        loss=np.array([*dropped[ranks], 0.0]),
    )
