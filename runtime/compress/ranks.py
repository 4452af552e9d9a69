"""Which rank each projection gets: pure bookkeeping over losses and parameter counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CompressionError

_BISECTIONS = 200


@dataclass(frozen=True)
class Choice:
    """What a projection ``[out, in]`` can be: ``loss`` ``[min(in, out)]`` fp64 of dropping each
    term, in falling order."""

    out: int
    inner: int
    loss: NDArray[np.float64]


def allocate_ranks(choices: Sequence[Choice], keep: float, multiple: int) -> list[int | None]:
    """The ranks of least total loss with at most ``keep`` of all parameters; None is dense.

    Ranks are multiples of ``multiple``, and only those smaller than dense. For a price λ of a
    parameter, each projection by itself takes what minimizes loss + λ parameters; the lowest λ that
    fits the budget is found by bisection. So a projection that truncates badly stays dense, and
    others pay for it. The optimum is exact on the convex hull of the choices.

    Raises `CompressionError` if the smallest ranks are more than ``keep``.
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


@dataclass(frozen=True)
class _Options:
    """By rising size: ranks (None, the last, is dense), parameters, and loss."""

    ranks: list[int | None]
    parameters: NDArray[np.float64]
    loss: NDArray[np.float64]

    def best(self, price: float) -> int:
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
