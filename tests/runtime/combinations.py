"""Combinations of parameters for kernel tests, which are slow in Triton's interpreter."""

from collections.abc import Callable, Sequence
from itertools import combinations as subsets
from itertools import product
from typing import Any

from tests.runtime.device import DEVICE


def combinations(
    *axes: Sequence[Any], valid: Callable[..., bool] = lambda *_: True, covered: int = 2
) -> list[tuple[Any, ...]]:
    """Return combinations of one value per axis: all on a GPU, else few.

    Args:
        valid: whether a combination, passed as positional arguments, is possible.
        covered: without a GPU, number of axes whose values occur in every combination: 2 for every
            pair of values, 1 for every value.
    """
    all_ = [row for row in product(*map(range, map(len, axes))) if valid(*_values(axes, row))]
    chosen = all_ if DEVICE.type == "cuda" else _covering(all_, covered)
    return [_values(axes, row) for row in chosen]


def _values(axes: Sequence[Sequence[Any]], row: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(axis[index] for axis, index in zip(axes, row, strict=True))


def _covering(rows: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Choose rows greedily until they have all combinations of ``size`` values that ``rows`` have.

    ``size`` 2 is known as pairwise testing.
    """
    parts = {row: set(subsets(enumerate(row), size)) for row in rows}
    left = set[Any]().union(*parts.values())
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(parts[row] & left))
        chosen.append(best)
        left -= parts[best]
    return chosen
