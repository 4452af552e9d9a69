"""Layers of random factors, and pages of random latents, for tests of format `lowrank`."""

import torch
from torch import Tensor

from runtime.checkpoint.weights import FactorPair, LayerWeights
from runtime.config import ModelConfig
from runtime.kv.lowrank.factors import LayerFactors
from tests.runtime.attention.samples import PAGE, pages_of
from tests.runtime.tiny import tiny_checkpoint


def factors_of(
    config: ModelConfig,
    ranks: tuple[int, int],
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LayerFactors:
    """Return random factors of K and V with these ranks."""
    k, v = ranks
    checkpoint = tiny_checkpoint(
        config=config, ranks=(None, k, v, None, None, None, None), bias=bias
    )
    layer = checkpoint.layers[0]
    assert isinstance(layer, LayerWeights)
    assert isinstance(layer.k, FactorPair)
    return LayerFactors.of(layer, torch.device(device), dtype)


def empty_planes(factors: LayerFactors, pages: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return planes whose slots are NaN."""
    k, v = (
        torch.full((pages, 1, PAGE, each.u.shape[1]), torch.nan, dtype=torch.bfloat16)
        for each in (factors.k, factors.v)
    )
    return k.to(device), v.to(device)


def random_latents(
    factors: LayerFactors, lengths: list[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return planes with random latents of sequences, and NaN in all unused slots."""
    generator = torch.Generator().manual_seed(5)
    count = sum(-(-length // PAGE) for length in lengths) + 1
    planes = empty_planes(factors, count, torch.device("cpu"))
    for plane, factor in zip(planes, (factors.k, factors.v), strict=True):
        for length, pages in zip(lengths, pages_of(lengths), strict=True):
            for number, page in enumerate(pages):
                used = min(PAGE, length - number * PAGE)
                latents = torch.randn(used, factor.rank, generator=generator)
                plane[page, 0, :used] = 0
                plane[page, 0, :used, : factor.rank] = latents.bfloat16()
    k, v = planes
    return k.to(device), v.to(device)
