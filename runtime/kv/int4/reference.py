"""Reference of the format `int4` in plain torch; it specifies the stored bits."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.format import Plane
from runtime.kv.quantized import QuantizedFormat, VectorQuantizer
from runtime.kv.transforms import check_transformable, hadamard, pack, unpack

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.kernel_source import KernelSource

BITS = 4
HALVES = 2
_LEVELS_PER_SIGN = 2 ** (BITS - 1)
_ZERO = _LEVELS_PER_SIGN - 0.5
"""Code c stands for ``(c - 7.5) * scale``: 16 levels, symmetric about zero."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Transform vectors and quantize each half of the result to 16 uniform levels.

    The scale (step) of a half is its largest magnitude / 8, rounded to bf16. The largest element
    is then at the outer edge of the outermost interval, and no error exceeds half a step, except
    for the rounding of the scale.

    Args:
        x: bf16 or fp32 `[..., d]`, d a power of two of at least 4.

    Returns:
        Packed codes, uint8 `[..., d / 2]`, and scales, bf16 `[..., 2]`: of the elements in the low
        and in the high nibbles. If an element of the transformed vector is not finite, both scales
        are NaN and all codes 8.
    """
    transformed = hadamard(x)
    halves = torch.stack(transformed.chunk(HALVES, dim=-1), dim=-2)  # [..., 2, d / 2]
    largest = halves.abs().amax(dim=-1)  # [..., 2]
    finite = largest.isfinite().all(dim=-1, keepdim=True)
    # A NaN that is converted from fp32 would have other bits on a GPU than on a CPU.
    scales = (largest / _LEVELS_PER_SIGN).to(torch.bfloat16).masked_fill(~finite, torch.nan)
    step = scales.float().unsqueeze(-1)
    steps = torch.where(step > 0, halves / step, 0)
    codes = (steps.floor() + _LEVELS_PER_SIGN).clamp(0, 2 * _LEVELS_PER_SIGN - 1)
    return pack(codes.to(torch.uint8).flatten(-2), BITS), scales


def dequantize(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the vectors, fp32 `[..., d]`; all elements of a vector with scale NaN are NaN."""
    return hadamard(dequantize_transformed(packed, scales))


def dequantize_transformed(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the Hadamard transforms of the vectors, fp32 `[..., d]`."""
    low, high = unpack(packed, BITS).float().chunk(HALVES, dim=-1)
    scale_low, scale_high = scales.float().chunk(HALVES, dim=-1)
    return torch.cat(((low - _ZERO) * scale_low, (high - _ZERO) * scale_high), dim=-1)


INT4 = VectorQuantizer(quantize, dequantize)
"""Quantization of K and V, and of K in format `k4v2`."""


class Int4Format(QuantizedFormat):
    """K (after RoPE) and V as 4-bit codes, each with two scales per token and head."""

    name = "int4"
    version = 1

    def __init__(self, config: ModelConfig) -> None:
        """Create the format.

        Raises:
            ValueError: the head dimension is not a power of two of at least 4.
        """
        check_transformable(config.head_dim, self.name)
        super().__init__(config, INT4, INT4, min_fused_dim=64)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        heads = self._config.num_kv_heads
        codes = heads, page_size, self._config.head_dim * BITS // 8
        scales = heads, page_size, HALVES
        return (
            Plane("k", torch.uint8, codes, encodable=False),
            Plane("v", torch.uint8, codes, encodable=False),
            Plane("k_scale", torch.bfloat16, scales, encodable=False),
            Plane("v_scale", torch.bfloat16, scales, encodable=False),
        )

    def kernel_source(self) -> "KernelSource":
        """See `QuantizedFormat`."""
        from runtime.kv.int4 import fragments, kernels
        from runtime.kv.kernel_source import EncodeSource, FragmentSource, KernelSource

        return KernelSource(
            EncodeSource(kernels.encode, heads=4, warps=2),
            kernels.attend,
            kernels.finish,
            tile=32,
            full_precision_tile=16,
            warps=1,
            programs=8,
            rows=8,
            fragments=FragmentSource(fragments.attend, fragments.PARTS, tile=64),
        )
