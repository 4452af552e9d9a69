"""The matrix that maps codes of K to keys, rounded to fp8."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_LARGEST_FP8 = 448.0
_LARGEST_MEAN = 2.0**22
"""Largest mean in units of the weights. The kernel reads the mean, divided by 512, as fp16."""
_CODE_UNIT = 512.0
"""An e4m3 number whose bits are the integer n < 16 has the value n / 512."""
_ZERO = 8
"""Code of coefficient 0."""
_MULTIPLE = 32
"""The bytes of a token are padded to a multiple of this, the depth of an fp8 matmul."""


@dataclass(frozen=True)
class KeyDecoder:
    """Keys before RoPE as a linear function of codes: ``unit * weights @ steps + mean``.

    Attributes:
        weights: e4m3 ``[kv_heads, dim, rank]``.
        unit: fp32 ``[kv_heads]``, powers of two.
        mean: fp32 ``[kv_heads, dim]``.
    """

    weights: Tensor
    unit: Tensor
    mean: Tensor

    @classmethod
    def of(cls, basis: Tensor, scales: Tensor, mean: Tensor, kv_heads: int) -> Self:
        """Round the products of basis and scales to e4m3.

        The unit of a head is the smallest power of two with which its weights and mean are in
        range.

        Args:
            basis: fp32 ``[kv_heads * dim, rank]``.
            scales: fp32 ``[rank]``, value of one step of each coefficient.
            mean: fp32 ``[kv_heads * dim]``.
        """
        exact = (basis * scales).view(kv_heads, -1, basis.shape[1])
        means = mean.view(kv_heads, -1)
        needed = torch.maximum(
            exact.abs().amax((1, 2)) / _LARGEST_FP8, means.abs().amax(1) / _LARGEST_MEAN
        ).clamp_min(2.0**-100)
        unit = 2.0 ** needed.log2().ceil()
        weights = (exact / unit[:, None, None]).to(torch.float8_e4m3fn)
        return cls(weights, unit, means)

    def matrix(self) -> Tensor:
        """Return fp32 ``[rank, kv_heads * dim]``: keys are ``steps @ matrix + mean``."""
        exact = self.weights.float() * self.unit[:, None, None]
        return exact.flatten(0, 1).T.contiguous()

    def kernel_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the attention kernel reads, for codes of 4 bits.

        Returns:
            - e4m3 ``[kv_heads, 2, dim, bytes]``, weights of the low and of the high nibbles of the
              bytes of a token; 0 for bytes of padding;
            - fp32 ``[kv_heads, dim]``, offsets to add to the products of weights and codes;
            - fp32 ``[kv_heads]``, unit of these sums.
        """
        kv_heads, dim, rank = self.weights.shape
        size = -(-rank // 2 // _MULTIPLE) * _MULTIPLE
        padded = self.weights.new_zeros(kv_heads, 2, dim, size)
        padded[..., : rank // 2] = self.weights.view(kv_heads, dim, 2, -1).transpose(1, 2)
        unit = self.unit * _CODE_UNIT
        # Codes are unsigned in the kernel.
        offsets = self.mean / unit[:, None] - self.weights.float().sum(2) * (_ZERO / _CODE_UNIT)
        return padded, offsets, unit
