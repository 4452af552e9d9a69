"""Reference of `stream8`, `stream4` and `stream4-qjl` in plain torch; it specifies the bits."""

import math
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.format import Plane
from runtime.kv.quantized import QuantizedFormat, VectorQuantizer
from runtime.kv.stream.levels import lloyd_max
from runtime.kv.transforms import check_transformable, hadamard, pack, sum_by_halves, unpack

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import LayerInputs
    from runtime.kv.kernel_source import KernelSource

_SIGNS_PER_BYTE = 8
_SIGN_SEED = 0
"""Seed of the random signs of the QJL projection, which all workers share."""


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize the Hadamard transform of vectors to Lloyd-Max levels.

    A transformed vector of norm n has elements of approximately N(0, n² / d). The levels are those
    of N(0, 1) times ``n / sqrt(d)``, with n rounded to bf16.

    Args:
        x: bf16 or fp32 `[..., d]`, d a power of two of at least 4.
        bits: 4 or 8.

    Returns:
        Codes, uint8 `[..., d * bits / 8]`, and norms, bf16 `[..., 1]`. If a squared norm is not
        finite in fp32, the norm is NaN and all codes are 0.
    """
    transformed = hadamard(x)
    norms = _norms(transformed)
    codes = _codes(transformed, norms, bits)
    return codes if bits == 8 else pack(codes, bits), norms


def dequantize(stored: Tensor, norms: Tensor, bits: int) -> Tensor:
    """Return the vectors, fp32 `[..., d]`; all elements of a vector with norm NaN are NaN."""
    return hadamard(_levels(stored if bits == 8 else unpack(stored, bits), norms, bits))


def quantize_qjl(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize vectors as `quantize` does, and store signs of a projection of the residual.

    With the residual r of the transformed vector and the projection ``P = H D`` by random signs D
    and a Hadamard matrix H, the signs are those of ``P r``.

    Returns:
        Codes, then signs, uint8 `[..., d * (bits + 1) / 8]`; norms of the vectors and of their
        residuals, bf16 `[..., 2]`.
    """
    transformed = hadamard(x)
    norms = _norms(transformed)
    codes = _codes(transformed, norms, bits)
    residual = transformed - _levels(codes, norms, bits)
    projected = hadamard(residual * _signs(x.shape[-1]).to(x.device))
    signs = pack((projected >= 0).to(torch.uint8), 1)
    both = torch.cat((norms, _norms(residual)), dim=-1)
    return torch.cat((pack(codes, bits), signs), dim=-1), both


def dequantize_qjl(stored: Tensor, norms: Tensor, bits: int) -> Tensor:
    """Return the vectors with the estimate of their residuals, fp32 `[..., d]`.

    The estimate ``sqrt(π / 2) ‖r‖ / sqrt(d) · Pᵀ sign(P r)`` makes inner products with any vector
    unbiased for a normal projection P (QJL, Zandieh et al. 2024); P here is orthogonal.
    """
    dim = stored.shape[-1] * 8 // (bits + 1)
    size = dim * bits // 8
    signs = unpack(stored[..., size:], 1).float() * 2 - 1
    scale = math.sqrt(math.pi / 2 / dim) * norms[..., 1:].float()
    residual = hadamard(signs * scale) * _signs(dim).to(stored.device)
    levels = _levels(unpack(stored[..., :size], bits), norms[..., :1], bits)
    return hadamard(levels + residual)


class StreamFormat(QuantizedFormat):
    """K (after RoPE) and V as Lloyd-Max codes with a norm; all layers are alike.

    `stream8` and `stream4` have Triton kernels, `stream4-qjl` has none.
    """

    version = 2

    def __init__(self, config: ModelConfig, bits: int, *, qjl: bool = False) -> None:
        """Create the format.

        Args:
            bits: bits of a code, 4 or 8.
            qjl: whether K has the QJL correction; only with 4 bits.

        Raises:
            ValueError: the head dimension is not a power of two of at least 8.
        """
        self.name = f"stream{bits}-qjl" if qjl else f"stream{bits}"
        check_transformable(config.head_dim, self.name)
        if config.head_dim % _SIGNS_PER_BYTE:
            raise ValueError(f"KV format {self.name} needs heads of at least 8 dimensions")
        self._bits = bits
        self._qjl = qjl
        values = VectorQuantizer(partial(quantize, bits=bits), partial(dequantize, bits=bits))
        keys = values
        if qjl:
            keys = VectorQuantizer(
                partial(quantize_qjl, bits=bits), partial(dequantize_qjl, bits=bits)
            )
        super().__init__(config, keys, values, min_fused_dim=64)
        self.fused &= not qjl

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        dim = self._config.head_dim
        code_bytes = dim * self._bits // 8
        signs, norms = (dim // _SIGNS_PER_BYTE, 2) if self._qjl else (0, 1)

        def plane(name: str, dtype: torch.dtype, elements: int) -> Plane:
            shape = self._config.num_kv_heads, page_size, elements
            return Plane(name, dtype, shape, encodable=False)

        return (
            plane("k", torch.uint8, code_bytes + signs),
            plane("v", torch.uint8, code_bytes),
            plane("k_norm", torch.bfloat16, norms),
            plane("v_norm", torch.bfloat16, 1),
        )

    def kernel_source(self) -> "KernelSource":
        """See `QuantizedFormat`."""
        from runtime.kv.kernel_source import EncodeSource, KernelSource
        from runtime.kv.stream import kernels

        if self._bits == 4:
            return KernelSource(
                EncodeSource(kernels.encode4),
                kernels.attend4,
                kernels.finish,
                tile=64,
                stages=5,
            )
        return KernelSource(
            EncodeSource(kernels.encode8, warps=4),
            kernels.attend8,
            kernels.finish,
            tile=64,
            warps=4,
        )

    def kernel_inputs(self, device: torch.device) -> "LayerInputs":
        """Return levels and edges; see `runtime.kv.stream.kernels`."""
        from runtime.kv.gpu import LayerInputs

        levels, edges = lloyd_max(self._bits)
        return LayerInputs((levels.to(device, torch.bfloat16), edges.to(device)))


def _norms(x: Tensor) -> Tensor:
    squared = sum_by_halves(x * x)
    # A NaN that is converted from fp32 would have other bits on a GPU than on a CPU.
    norms: Tensor = squared.sqrt().to(torch.bfloat16).masked_fill(~squared.isfinite(), torch.nan)
    return norms


def _codes(transformed: Tensor, norms: Tensor, bits: int) -> Tensor:
    """Return codes, uint8 `[..., d]`."""
    _, edges = lloyd_max(bits)
    unit = norms.float() * transformed.shape[-1] ** -0.5
    scaled = torch.where(unit > 0, transformed / unit, 0.0)
    codes = torch.bucketize(scaled, edges.to(scaled.device)).to(torch.uint8)
    return codes * norms.isfinite()


def _levels(codes: Tensor, norms: Tensor, bits: int) -> Tensor:
    levels, _ = lloyd_max(bits)
    unit: Tensor = norms.float() * codes.shape[-1] ** -0.5
    return levels.to(codes.device)[codes.long()] * unit


@cache
def _signs(dim: int) -> Tensor:
    """Return fp32 `[dim]` of random signs."""
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    return torch.randint(2, (dim,), generator=generator).float() * 2 - 1
