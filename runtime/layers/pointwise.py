"""RMSNorm and SiLU of a decoder layer: compiled loops on the CPU in fp32, torch elsewhere."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.layers import loops


def _compiles(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


class RmsNorm:
    """RMSNorm over the last dimension, of size `d`; ``weight`` is `[d]`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._compiled = (weight.numpy(), np.float32(eps)) if _compiles(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._compiled is None or not x.is_contiguous():
            return functional.rms_norm(x, self._weight.shape, self._weight, self._eps)
        out = torch.empty_like(x)
        width = x.shape[-1]
        loops.rms_norm(
            x.numpy().reshape(-1, width), *self._compiled, out.numpy().reshape(-1, width)
        )
        return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) · up`` `[n, d]` from ``gate_up`` `[n, 2 d]`, gate first."""
    if not _compiles(gate_up):
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate) * up
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    loops.silu_mul(gate_up.numpy(), out.numpy())
    return out
