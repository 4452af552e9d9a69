"""The Triton kernels of format `lowrank`, compared with the torch reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.config import ModelConfig, RopeConfig
from runtime.gemm.weights import by_halves
from runtime.kv.lowrank import reference
from runtime.kv.lowrank.factors import LayerFactors
from runtime.kv.lowrank.gpu import LatentKernels
from runtime.kv.rotation import PageRotation
from tests.runtime.attention.samples import PAGE, batch_of
from tests.runtime.device import DEVICE, random
from tests.runtime.kv.latent_layers import empty_planes, factors_of, random_latents
from tests.runtime.tiny import CONFIG as TINY

pytestmark = [pytest.mark.triton, pytest.mark.long]

ULP = 2**-7
"""Largest relative difference of two neighbouring bf16 numbers."""
TOLERANCE = 1e-2
"""Weights and keys are rounded to bf16 before they are multiplied."""
YARN = RopeConfig(scaling="yarn", factor=4.0, original_context=100, attention_factor=1.14)
SHAPES = [
    # query heads, KV heads, head dimension, ranks of K and V
    (6, 2, 16, (13, 11)),
    (8, 4, 64, (100, 40)),
    (4, 4, 20, (24, 16)),
    (3, 1, 96, (70, 90)),
    (8, 1, 128, (72, 130)),
]


def config_of(heads: int, kv_heads: int, dim: int, rope: RopeConfig = TINY.rope) -> ModelConfig:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    return replace(TINY, **sizes, rope=rope)  # type: ignore[arg-type]


def made_of(config: ModelConfig, *, by_halves: bool = False) -> tuple[LatentKernels, PageRotation]:
    rotation = PageRotation(config, DEVICE)
    return LatentKernels(config, rotation, by_halves=by_halves), rotation


def rebuilt(
    config: ModelConfig, factors: LayerFactors, planes: tuple[Tensor, ...], batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return K and V of the reference in pages, bf16, with NaN where there are no tokens."""
    shape = len(planes[0]), config.num_kv_heads, PAGE, config.head_dim
    k, v = torch.full((2, *shape), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    pages, first = reference.pages_of(batch, PAGE)
    rebuild = reference.Rebuild.of(factors, PageRotation(config, DEVICE), config.head_dim)
    keys, values = rebuild(planes, pages, first)
    k[pages], v[pages] = keys.bfloat16(), values.bfloat16()
    return k, v


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "ranks"), SHAPES)
def test_append_writes_latents_and_rotates_queries(
    heads: int, kv_heads: int, dim: int, ranks: tuple[int, int], packed: bool
) -> None:
    packed = packed and dim % 16 == 0  # as packed layers require
    config = config_of(heads, kv_heads, dim, YARN)
    factors = factors_of(config, ranks, device=DEVICE)
    kernels, rotation = made_of(config, by_halves=packed)
    batch = batch_of([40, 1, 17], 9, DEVICE)
    qkv = random(len(batch.tokens), heads * dim + sum(ranks))
    found, expected = (empty_planes(factors, 8, DEVICE) for _ in range(2))
    want = reference.append(qkv, rotation.tables, expected, batch, factors, dim)
    if packed:
        q = by_halves(qkv[:, : heads * dim].T.contiguous(), dim).T
        qkv = torch.cat([q, qkv[:, heads * dim :]], dim=1)
    got = kernels.append(qkv, rotation.tables, found, batch, factors)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "ranks"), SHAPES)
def test_rebuilt_pages_are_near_the_reference(
    heads: int, kv_heads: int, dim: int, ranks: tuple[int, int], bias: bool
) -> None:
    config = config_of(heads, kv_heads, dim, YARN if bias else TINY.rope)
    factors = factors_of(config, ranks, bias=bias, device=DEVICE)
    lengths = [1, 16, 130, 47]
    planes = random_latents(factors, lengths, DEVICE)
    batch = batch_of(lengths, 1, DEVICE)
    expected = rebuilt(config, factors, planes, batch)
    found = torch.full_like(torch.stack(expected), torch.nan)
    kernels, _ = made_of(config)
    kernels.rebuild(planes, batch, factors, *found)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=ULP, atol=1e-5, equal_nan=True)
        assert not got[0].isfinite().any(), "page 0 belongs to no sequence"
        differ = (got != want) & want.isfinite()
        assert differ.float().mean() < 0.01
