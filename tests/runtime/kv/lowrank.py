"""Random activations, moments and pages for tests of the calibrated formats."""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.calibration import KVMoments
from runtime.kv.calibration.moments import SKIPPED
from runtime.kv.compressed import CompressedFormat
from runtime.kv.rotation import PageRotation
from tests.runtime.kv.compressed_data import compressed_planes
from tests.runtime.tiny import CONFIG as TINY

PAGE = 16
CONFIG = replace(TINY, head_dim=64, num_heads=8, num_kv_heads=4, context_length=700)
"""Two layers, four KV heads of 64, groups of two query heads."""

QKV = tuple[Tensor, Tensor, Tensor]


def orthonormal(*shape: int, seed: int) -> Tensor:
    """Return random matrices with orthonormal columns."""
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(*shape, generator=generator))[0]
    return basis


def activations(basis: Tensor, seed: int, tokens: int = 256) -> Tensor:
    """Return fp32 ``[heads, tokens, dim]`` in the column space of ``basis`` ``[heads, dim, r]``."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(basis.shape[0], tokens, basis.shape[2], generator=generator)
    return weights @ basis.mT


def moments_of(config: ModelConfig, *texts: QKV) -> KVMoments:
    """Return the moments of q, k and v ``[heads, tokens, dim]`` at positions from 16."""
    moments = KVMoments.of(config)
    rotation = PageRotation(config)
    for text in texts:
        q, k, v = (torch.cat((x[:, :SKIPPED] * 1e6, x), 1)[None] for x in text)
        moments.add(q, k, v, rotation)
    return moments


def pages_of(tokens: Tensor) -> Tensor:
    """Cut ``[heads, n, dim]`` into bf16 pages ``[n / 16, heads, 16, dim]``."""
    heads, _, dim = tokens.shape
    return tokens.bfloat16().reshape(heads, -1, PAGE, dim).transpose(0, 1).contiguous()


def round_trip(kv_format: CompressedFormat, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode and decode pages of layer 0 at positions from 16, in scattered compressed pages."""
    count = len(keys)
    planes = compressed_planes(kv_format, 2 * count + 1)
    targets = torch.arange(count).flip(0) * 2 + 1
    first = (1 + torch.arange(count)) * PAGE
    kv_format.layer(0).encode(keys, values, first, planes, targets)
    return kv_format.layer(0).decode(planes, targets, first)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ‖found - expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.float().norm())
