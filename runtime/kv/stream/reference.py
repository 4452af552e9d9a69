"""Reference of `stream8`, `stream4` and `stream4-qjl` in plain torch; it specifies the bits."""

import math
from functools import cache, partial

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.format import Plane
from runtime.kv.quantized import QuantizedFormat, VectorQuantizer
from runtime.kv.stream.levels import lloyd_max
from runtime.kv.transforms import check_transformable, hadamard, pack, sum_by_halves, unpack

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


class Stream8Format(QuantizedFormat):
    """K after RoPE and V as 8-bit codes with a norm."""

    name = "stream8"
    version = 1

    def __init__(self, config: ModelConfig) -> None:
        """Create the format.

        Raises:
            ValueError: the head dimension is not a power of two of at least 4.
        """
        check_transformable(config.head_dim, self.name)
        codes = VectorQuantizer(partial(quantize, bits=8), partial(dequantize, bits=8))
        super().__init__(config, codes, codes)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        dim = self._config.head_dim
        return _planes(self._config, page_size, (dim, dim, 1, 1))


class Stream4Format(QuantizedFormat):
    """K after RoPE and V as 4-bit codes with a norm; K optionally with the QJL correction."""

    version = 1

    def __init__(self, config: ModelConfig, *, qjl: bool = False) -> None:
        """Create the format `stream4`, or with ``qjl`` the format `stream4-qjl`.

        Raises:
            ValueError: the head dimension is not a power of two of at least 8.
        """
        self.name = "stream4-qjl" if qjl else "stream4"
        check_transformable(config.head_dim, self.name)
        if config.head_dim % 8:
            raise ValueError(f"KV format {self.name} needs heads of at least 8 dimensions")
        codes = VectorQuantizer(partial(quantize, bits=4), partial(dequantize, bits=4))
        corrected = VectorQuantizer(partial(quantize_qjl, bits=4), partial(dequantize_qjl, bits=4))
        self._signs = config.head_dim // 8 if qjl else 0
        super().__init__(config, corrected if qjl else codes, codes)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        size = self._config.head_dim // 2
        norms = 2 if self._signs else 1
        return _planes(self._config, page_size, (size + self._signs, size, norms, 1))


def _planes(
    config: ModelConfig, page_size: int, widths: tuple[int, int, int, int]
) -> tuple[Plane, ...]:
    names, codes, norms = ("k", "v", "k_norm", "v_norm"), torch.uint8, torch.bfloat16
    return tuple(
        Plane(name, dtype, (config.num_kv_heads, page_size, width), encodable=False)
        for name, dtype, width in zip(names, (codes, codes, norms, norms), widths, strict=True)
    )


def _norms(x: Tensor) -> Tensor:
    squared = sum_by_halves(x * x)
    return torch.where(squared.isfinite(), squared.sqrt(), torch.nan).to(torch.bfloat16)


def _codes(transformed: Tensor, norms: Tensor, bits: int) -> Tensor:
    """Return codes, uint8 `[..., d]`."""
    _, edges = lloyd_max(bits)
    unit = norms.float() / math.sqrt(transformed.shape[-1])
    scaled = torch.where(unit > 0, transformed / unit, 0.0)
    codes = torch.bucketize(scaled, edges.to(scaled.device)).to(torch.uint8)
    return codes * norms.isfinite()


def _levels(codes: Tensor, norms: Tensor, bits: int) -> Tensor:
    levels, _ = lloyd_max(bits)
    unit = norms.float() / math.sqrt(codes.shape[-1])
    return levels.to(codes.device)[codes.long()] * unit


@cache
def _signs(dim: int) -> Tensor:
    """Return fp32 `[dim]` of random signs."""
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    return torch.randint(2, (dim,), generator=generator).float() * 2 - 1
