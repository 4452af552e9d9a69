"""Lloyd-Max quantizer of N(0, 1) with many levels."""

import math
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

_ITERATIONS = 300


@cache
def lloyd_max(bits: int) -> tuple[Tensor, Tensor]:
    """Return the levels, fp32 ``[2 ** bits]``, and the edges between them, one fewer.

    Lloyd's iteration replaces each level by the mean of N(0, 1) between its edges. It starts from
    quantiles of N(0, 3), the asymptotically optimal density of levels (Panter and Dite 1951).
    """
    normal = NormalDist()
    count = 2**bits
    half = [math.sqrt(3) * normal.inv_cdf((i + 0.5) / count) for i in range(count // 2, count)]
    for _ in range(_ITERATIONS):
        inner = [(a + b) / 2 for a, b in pairwise(half)]
        edges = [0.0, *inner, math.inf]
        density = [normal.pdf(edge) if edge < math.inf else 0.0 for edge in edges]
        beyond = [math.erfc(edge / math.sqrt(2)) / 2 for edge in edges]
        half = [
            (density[i] - density[i + 1]) / (beyond[i] - beyond[i + 1]) for i in range(len(half))
        ]
    levels = torch.tensor([*(-level for level in reversed(half)), *half], dtype=torch.float64)
    return levels.float(), ((levels[1:] + levels[:-1]) / 2).float()


def bf16_magnitudes() -> list[int]:
    """Return the positive levels of `lloyd_max(4)`, rounded to bf16, ascending.

    Returns:
        Eight bit patterns of 16 bits.
    """
    levels, _ = lloyd_max(4)
    return [bits & 0xFFFF for bits in levels[8:].to(torch.bfloat16).view(torch.int16).tolist()]
