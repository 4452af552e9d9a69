"""Reference of the format `k4v2` in plain torch; it specifies the stored bits."""

from typing import TYPE_CHECKING

import torch

from runtime.config import ModelConfig
from runtime.kv import two_bits
from runtime.kv.format import Plane
from runtime.kv.int4.reference import BITS as K_BITS
from runtime.kv.int4.reference import HALVES, INT4
from runtime.kv.quantized import QuantizedFormat, VectorQuantizer
from runtime.kv.transforms import check_transformable
from runtime.kv.two_bits import BITS as V_BITS

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.kernel_source import KernelSource


class K4V2Format(QuantizedFormat):
    """K after RoPE as 4-bit codes with two scales, V as 2-bit codes with a norm."""

    name = "k4v2"
    version = 2

    def __init__(self, config: ModelConfig) -> None:
        """Create the format.

        Raises:
            ValueError: the head dimension is not a power of two of at least 4.
        """
        check_transformable(config.head_dim, self.name)
        values = VectorQuantizer(two_bits.quantize, two_bits.dequantize)
        super().__init__(config, INT4, values, min_fused_dim=64)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        heads, dim = self._config.num_kv_heads, self._config.head_dim

        def plane(name: str, dtype: torch.dtype, elements: int) -> Plane:
            return Plane(name, dtype, (heads, page_size, elements), encodable=False)

        return (
            plane("k", torch.uint8, dim * K_BITS // 8),
            plane("v", torch.uint8, dim * V_BITS // 8),
            plane("k_scale", torch.bfloat16, HALVES),
            plane("v_norm", torch.bfloat16, 1),
        )

    def kernel_source(self) -> "KernelSource":
        """See `QuantizedFormat`."""
        from runtime.kv.k4v2 import fragments, kernels
        from runtime.kv.kernel_source import EncodeSource, FragmentSource, KernelSource

        # With more warps, matmuls of 16 columns would be computed twice.
        by_warps = FragmentSource(fragments.attend, fragments.PARTS, tile=64, dims=(128,))
        return KernelSource(
            EncodeSource(kernels.encode, heads=4, warps=2),
            kernels.attend,
            kernels.finish,
            tile=64,
            rows=8,
            fragments=by_warps,
        )
