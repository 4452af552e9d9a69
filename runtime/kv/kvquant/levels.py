"""Levels of a quantizer from samples: weighted k-means of numbers, or equal steps."""

import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.kv.kvquant.codes import edges_of

LEVELS = "kmeans", "uniform"
"""Kinds of levels."""
_ITERATIONS = 200
_RANGES = 40
"""Number of ranges that are compared for uniform levels."""


def fit_levels(samples: Tensor, weights: Tensor, count: int, kind: str) -> Tensor:
    """Return levels with a small weighted squared error.

    Levels "kmeans" are a local optimum of Σ weight (sample - nearest level)², by Lloyd's iteration
    from weighted quantiles of the samples. Levels "uniform" have equal steps and are symmetric
    about 0; their range is the best of `_RANGES` fractions of the largest magnitude.

    Args:
        samples: fp32 ``[n]``.
        weights: fp32 ``[n]``, at least 0.
        count: number of levels.
        kind: one of `LEVELS`.

    Returns:
        fp32 ``[count]``, ascending.

    Raises:
        KVFormatError: there are fewer samples than levels.
    """
    if len(samples) < count:
        raise KVFormatError(f"{len(samples)} samples are too few for {count} levels")
    ordered, order = samples.double().sort()
    # Sums over an interval of ordered samples are differences of prefix sums.
    weight = weights.double()[order]
    prefix = [
        torch.cat((x.new_zeros(1), x.cumsum(0)))
        for x in (weight, weight * ordered, weight * ordered.square())
    ]
    if kind == "uniform":
        largest = ordered.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        steps = torch.linspace(-1, 1, count, dtype=torch.float64, device=samples.device)
        ranges = [steps * largest * (part / _RANGES) for part in range(1, _RANGES + 1)]
        return min(ranges, key=lambda levels: _error(ordered, prefix, levels)).float()
    parts = (torch.arange(count, dtype=torch.float64, device=samples.device) + 0.5) / count
    at = torch.searchsorted(prefix[0][1:], parts * prefix[0][-1])
    levels = ordered[at.clamp_max(len(ordered) - 1)]
    for _ in range(_ITERATIONS):
        total, moment, _ = _sums(ordered, prefix, levels)
        means = moment / total.clamp_min(torch.finfo(torch.float64).tiny)
        # Rounding of prefix sums may move a mean out of its interval.
        levels = torch.where(total > 0, means, levels).sort().values
    return levels.float()


def _sums(ordered: Tensor, prefix: list[Tensor], levels: Tensor) -> list[Tensor]:
    """Return Σ w, Σ w x and Σ w x² of the samples nearest to each level."""
    cuts = torch.searchsorted(ordered, edges_of(levels), right=True)
    ends = torch.cat((cuts, cuts.new_full((1,), len(ordered))))
    starts = torch.cat((cuts.new_zeros(1), cuts))
    return [sums[ends] - sums[starts] for sums in prefix]


def _error(ordered: Tensor, prefix: list[Tensor], levels: Tensor) -> float:
    total, moment, square = _sums(ordered, prefix, levels)
    return float((square - 2 * levels * moment + levels.square() * total).sum())
