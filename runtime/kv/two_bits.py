"""2-bit quantization of Hadamard-transformed vectors, for values.

A stored vector does not depend on the other vectors of a call: all operations are elementwise or
sums in a fixed order.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kv.transforms import hadamard, pack, sum_by_halves, unpack

BITS = 2


@dataclass(frozen=True)
class TwoBitQuantizer:
    """Quantizer with 4 levels, symmetric about zero.

    A transformed vector of norm n has elements of approximately N(0, n² / d), whatever the vector
    was. The levels are therefore those of N(0, 1) times ``n / sqrt(d)``, with n rounded to bf16.

    Attributes:
        inner, outer: the positive levels of N(0, 1).
        edge: the edge between them.
    """

    inner: float
    outer: float
    edge: float

    @property
    def levels(self) -> tuple[float, float, float, float]:
        """The levels of N(0, 1) by code."""
        return -self.outer, -self.inner, self.inner, self.outer

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Transform vectors and quantize each element to the nearest level.

        Args:
            x: bf16 or fp32 `[..., d]`, d a power of two of at least 4.

        Returns:
            Packed codes, uint8 `[..., d / 4]`, and norms, bf16 `[..., 1]`. If the squared norm is
            not finite in fp32, the norm is NaN and all codes are 0. Norms below about 1e-22, whose
            square underflows, become 0.
        """
        transformed = hadamard(x)
        squared = sum_by_halves(transformed * transformed)
        finite = squared.isfinite()
        # A NaN that is converted from fp32 would have other bits on a GPU than on a CPU.
        norms = squared.sqrt().to(torch.bfloat16).masked_fill(~finite, torch.nan)
        edge = norms.float() * (self.edge / math.sqrt(x.shape[-1]))
        reached = (transformed >= -edge, transformed >= 0, transformed >= edge)
        codes = torch.stack(reached).sum(dim=0, dtype=torch.uint8)
        return pack(codes * finite, BITS), norms

    def dequantize(self, packed: Tensor, norms: Tensor) -> Tensor:
        """Return the vectors, fp32 `[..., d]`; all elements of a vector with norm NaN are NaN."""
        return hadamard(self.dequantize_transformed(packed, norms))

    def dequantize_transformed(self, packed: Tensor, norms: Tensor) -> Tensor:
        """Return the Hadamard transforms of the vectors, fp32 `[..., d]`."""
        codes = unpack(packed, BITS)
        levels = torch.tensor(self.levels, dtype=torch.float64) / math.sqrt(codes.shape[-1])
        return levels.to(norms.device, torch.float32)[codes.long()] * norms.float()


LLOYD_MAX = TwoBitQuantizer(0.4527800346365, 1.5104176084991, 0.9815988215678)
"""Best quantizer of N(0, 1) (Max 1960, table I): a mean squared error of 0.1175."""
_STEP = 0.9957
UNIFORM = TwoBitQuantizer(_STEP / 2, 1.5 * _STEP, _STEP)
"""Best quantizer of N(0, 1) with equidistant levels (Max 1960, table II): 0.1188."""
