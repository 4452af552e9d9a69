"""Products of factor pairs, for linears that are smaller or faster without factors."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.weights import Dense, FactorPair, linears_of


def product(pair: FactorPair) -> Tensor:
    """Return W = U V, ``[out, in]``, computed and returned in fp32."""
    return pair.u.float() @ pair.v.float()


def is_larger_than_product(pair: FactorPair) -> bool:
    """Return whether a factor pair has more parameters than its product."""
    return pair.u.numel() + pair.v.numel() > pair.u.shape[0] * pair.v.shape[1]


def without_large_pairs(layer: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a layer in which factor pairs that are larger than their product are multiplied out.

    One product is computed at a time, in fp32 on ``device``, and rounded once to ``dtype``. Other
    tensors are not copied.

    Args:
        layer: weights in host memory, see `linears_of`.
    """
    dense = {
        name: Dense(
            product(replace(pair, u=pair.u.to(device), v=pair.v.to(device))).to(dtype), pair.bias
        )
        for name, pair in linears_of(layer)
        if isinstance(pair, FactorPair) and is_larger_than_product(pair)
    }
    return replace(layer, **dense) if dense else layer
