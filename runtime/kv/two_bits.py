"""2-bit quantization of Hadamard-transformed vectors, for values.

A transformed vector of norm n has elements of approximately N(0, n² / d), whatever the vector was.
Code c is therefore the level ``(c - 1.5) STEP`` of N(0, 1) times ``n / sqrt(d)``, with n rounded to
bf16. The edges are halfway between the levels: -STEP, 0 and STEP.

A stored vector does not depend on the other vectors of a call: all operations are elementwise or
sums in a fixed order.
"""

import math

import torch
from torch import Tensor

from runtime.kv.transforms import hadamard, pack, sum_by_halves, unpack

BITS = 2
STEP = 0.9957
"""Step of the best quantizer of N(0, 1) with 4 equidistant levels (Max 1960, table II)."""
LEVELS = tuple((code - 1.5) * STEP for code in range(1 << BITS))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Transform vectors and quantize each element to the nearest level.

    Args:
        x: bf16 or fp32 `[..., d]`, d a power of two of at least 4.

    Returns:
        Packed codes, uint8 `[..., d / 4]`, and norms, bf16 `[..., 1]`. If the squared norm is not
        finite in fp32, the norm is NaN and all codes are 0. Norms below about 1e-22, whose square
        underflows, become 0.
    """
    transformed = hadamard(x)
    squared = sum_by_halves(transformed * transformed)
    finite = squared.isfinite()
    # A NaN that is converted from fp32 would have other bits on a GPU than on a CPU.
    norms = squared.sqrt().to(torch.bfloat16).masked_fill(~finite, torch.nan)
    edge = norms.float() * (STEP / math.sqrt(x.shape[-1]))
    reached = (transformed >= -edge, transformed >= 0, transformed >= edge)
    codes = torch.stack(reached).sum(dim=0, dtype=torch.uint8)
    return pack(codes * finite, BITS), norms


def dequantize(packed: Tensor, norms: Tensor) -> Tensor:
    """Return the vectors, fp32 `[..., d]`; all elements of a vector with norm NaN are NaN."""
    return hadamard(dequantize_transformed(packed, norms))


def dequantize_transformed(packed: Tensor, norms: Tensor) -> Tensor:
    """Return the Hadamard transforms of the vectors, fp32 `[..., d]`."""
    codes = unpack(packed, BITS)
    levels = torch.tensor(LEVELS, dtype=torch.float64) / math.sqrt(codes.shape[-1])
    return levels.to(norms.device, torch.float32)[codes.long()] * norms.float()
