"""Shapes, sample pages and round trips for tests of compressed KV formats."""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.compressed import CompressedFormat
from runtime.kv.windowed import compressed_cache
from tests.runtime.tiny import CONFIG

LLAMA_3_8B = replace(CONFIG, num_heads=32, num_kv_heads=8, head_dim=128)
SMOLLM2_135M = replace(CONFIG, num_heads=9, num_kv_heads=3, head_dim=64)
PAGE = 16
FILL = 0xA5


def gaussian(config: ModelConfig, pages: int = 16, seed: int = 0) -> Tensor:
    """Return bf16 `[pages, kv_heads, PAGE, dim]` of N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    shape = pages, config.num_kv_heads, PAGE, config.head_dim
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def heavy_tailed(config: ModelConfig, pages: int = 16, seed: int = 0) -> Tensor:
    """Return bf16 `[pages, kv_heads, PAGE, dim]` of Student's t with 2 degrees of freedom.

    Its variance is infinite: most vectors have a few elements that are far larger than the others,
    as K has in some channels.
    """
    uniform = torch.rand(
        gaussian(config, pages).shape, generator=torch.Generator().manual_seed(seed)
    )
    centered = 2 * uniform.clamp(1e-6, 1 - 1e-6) - 1
    # Quantile function of Student's t with 2 degrees of freedom.
    return (centered * (2 / (1 - centered.square())).sqrt()).to(torch.bfloat16)


def compressed_planes(
    kv_format: CompressedFormat,
    pages: int,
    fill: int = FILL,
    *,
    layer: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Return the compressed planes of a layer of a cache, with every byte equal to ``fill``."""
    cache = compressed_cache(kv_format.planes(layer, PAGE), pages, device)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).fill_(fill)
    return cache.layer(0)


def is_unwritten(plane: Tensor) -> bool:
    """Return whether a plane of `compressed_planes` has its first content."""
    return bool((plane.contiguous().view(torch.uint8) == FILL).all())


def round_trip(kv_format: CompressedFormat, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode pages and return their decoded K and V."""
    pages = torch.arange(len(keys))
    planes = compressed_planes(kv_format, len(keys))
    layer = kv_format.layer(0)
    layer.encode(keys, values, pages * PAGE, planes, pages)
    return layer.decode(planes, pages, pages * PAGE)


def relative_rms(exact: Tensor, decoded: Tensor) -> float:
    """Return the root of the mean over vectors of squared error / squared norm."""
    exact = exact.double()
    errors = (decoded.double() - exact).square().sum(-1) / exact.square().sum(-1)
    return float(errors.mean().sqrt())


def bits(planes: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the planes as bytes, so that comparisons are exact also for NaN and -0."""
    return [plane.contiguous().view(torch.uint8) for plane in planes]


def same_bits(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    """Return whether all planes have equal bytes."""
    return all(map(torch.equal, bits(left), bits(right)))
