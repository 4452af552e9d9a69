"""Reference of the formats `fp8` and `fp8-e5m2` in plain torch; it specifies the stored bits."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.format import Plane
from runtime.kv.quantized import QuantizedFormat, VectorQuantizer

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.kernel_source import KernelSource

_NAMES = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8-e5m2"}
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}
"""n such that the largest finite number of the dtype is 0.875 * 2**n: 448 or 57,344."""
_BIAS = 127
_NOT_FINITE = 255
"""Scale byte of a vector with an element that is not finite: NaN in E8M0."""


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize vectors with one power-of-two scale each.

    The scale is the smallest one, not below 2**-126, with which no element exceeds the largest
    number of the dtype. Scaling is exact; only the conversion to fp8 rounds.

    Args:
        x: bf16 or fp32 `[..., d]`.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        Codes of ``dtype`` `[..., d]`, and E8M0 scales (biased exponents) as uint8 `[..., 1]`. A
        vector with an element that is not finite has scale NaN (255) and codes 0.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    finite = largest.isfinite()
    fraction, exponent = torch.frexp(largest)  # fraction in [0.5, 1), or 0
    exponent = exponent - _LARGEST_EXPONENT[dtype] + (fraction > 0.875)
    biased = torch.where(finite, (exponent + _BIAS).clamp(min=1), _NOT_FINITE)
    inverse = _power_of_two(2 * _BIAS - biased.clamp(max=2 * _BIAS))
    codes = torch.where(finite, x * inverse, 0).to(dtype)
    return codes, biased.to(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the vectors, fp32 `[..., d]`; all elements of a vector with scale NaN are NaN."""
    scale = torch.where(scales == _NOT_FINITE, torch.nan, _power_of_two(scales))
    return codes.float() * scale


def _power_of_two(biased: Tensor) -> Tensor:
    """Return ``2 ** (biased - 127)`` in fp32, for 1 <= biased <= 254. 0 gives 0, 255 infinity."""
    return (biased.to(torch.int32) << 23).view(torch.float32)


class FP8Format(QuantizedFormat):
    """K (after RoPE) and V as fp8, with a scale per token and head for each of K and V."""

    version = 1

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        """Create the format.

        Args:
            dtype: `torch.float8_e4m3fn` (format `fp8`) or `torch.float8_e5m2` (`fp8-e5m2`).

        Raises:
            ValueError: the dtype is another one.
        """
        if dtype not in _NAMES:
            raise ValueError(f"KV format fp8 has codes of e4m3 or e5m2, not {dtype}")
        self.name = _NAMES[dtype]
        self._dtype = dtype
        quantizer = VectorQuantizer(partial(quantize, dtype=dtype), dequantize)
        super().__init__(config, quantizer, quantizer)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        heads, dim = self._config.num_kv_heads, self._config.head_dim
        codes, scale = (heads, page_size, dim), (heads, page_size, 1)
        return (
            Plane("k", self._dtype, codes),
            Plane("v", self._dtype, codes),
            Plane("k_scale", torch.uint8, scale, encodable=False),
            Plane("v_scale", torch.uint8, scale, encodable=False),
        )

    def kernel_source(self) -> "KernelSource":
        """See `QuantizedFormat`."""
        from runtime.kv.fp8 import fragments, kernels
        from runtime.kv.kernel_source import EncodeSource, FragmentSource, KernelSource

        by_warps = FragmentSource(fragments.attend, fragments.PARTS, tile=32)
        return KernelSource(
            EncodeSource(kernels.encode, heads=4, warps=4),
            kernels.attend,
            kernels.finish,
            tile=64,
            stages=5,
            fragments=by_warps,
        )
