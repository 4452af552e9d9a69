"""Attention by warps, emulated, against attention in plain torch."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.config import ModelConfig, RopeConfig
from runtime.kv.cache import PagedCache
from runtime.kv.gpu import page_strides
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.registry import COMPRESSED
from runtime.kv.shard import ShardFormat, fragment_inputs
from runtime.kv.transforms import hadamard
from runtime.kv.windowed import compressed_cache
from runtime.offline.bench.kv_formats import random_shard
from runtime.pages.window import SINK_PAGES
from tests.runtime.kv.compressed_data import LLAMA_3_8B, PAGE, SMOLLM2_135M, heavy_tailed
from tests.runtime.kv.ptx_operations import LANES
from tests.runtime.kv.warp import Memory, Pointer, lanes, loaded

pytest.importorskip("triton")
KV_HEAD = 2
MODULES = {"int4": ("int4",), "shard": ("int4", "k4v2", "shard")}
"""Modules of a format's attention; by default, that of `int4` and its own."""
WEIGHTS = 11
"""Number of the plane with the weights of `shard`."""
TILE = 64
"""A multiple of the tokens of a tile in all formats."""


def group_of(config: ModelConfig) -> int:
    """Return the number of query heads of a KV head."""
    return config.num_heads // config.num_kv_heads


def attended(
    kv_format: QuantizedFormat | ShardFormat,
    cache: PagedCache,
    q: Tensor,
    ids: Tensor,
    begin: int,
    scale: float,
    inputs: tuple[Tensor | int, ...] = (),
) -> Tensor:
    """Return attention to the tokens from ``begin`` on, before the transform of V is undone.

    Args:
        inputs: those of `LayerInputs`.
    """
    memory = Memory()
    by_name: dict[str, Pointer] = {}
    for tensor, each in zip(cache.tensors, cache.layout.tensors, strict=True):
        names = [plane.name for plane in each.planes]
        by_name |= zip(names, memory.add(*each.views(tensor)), strict=True)
    stored = [by_name[plane.name] for plane in kv_format.planes(0, PAGE)]
    planes = *stored, *(memory.add(torch.as_tensor(x))[0] for x in inputs)
    (queries,), (table,) = memory.add(q), memory.add(ids.int())
    count = len(ids) * PAGE
    own = MODULES.get(kv_format.name, ("int4", kv_format.name.partition("-")[0]))
    kernels = ["runtime.kv.kernels.fragments", "runtime.kv.kernels.splits"]
    with loaded(memory, *kernels, *(f"runtime.kv.{name}.fragments" for name in own)) as modules:
        source = modules[-1]
        warps = getattr(source, "WARPS", 1)
        if warps > 1:  # one after another, so that copies have to be complete before
            copy_weights(memory, source, planes)
        results = []
        for memory.warp in range(warps):
            acc, m, sums = source.attend(
                queries, KV_HEAD, begin, -(-count // TILE) * TILE, count, planes, table,
                lanes(scale, "float32"), lanes(0, "int32"), *q.shape, page_strides(cache.layer(0)),
            )  # fmt: skip
            totals = [modules[0].sum_of_rows(x) for x in sums]
            results.append(WarpResult.of(acc, m, totals, source.PARTS, q))
    return merged(results)


def empty_cache(kv_format: QuantizedFormat | ShardFormat, pages: int) -> tuple[PagedCache, Tensor]:
    """Return a cache filled with NaN, and the ids of pages in it."""
    cache = compressed_cache(kv_format.planes(0, PAGE), pages + 2)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).fill_(0xFF)
    return cache, torch.randperm(pages + 2, generator=torch.Generator().manual_seed(0))[:pages]


def random_queries(config: ModelConfig, magnitude: float) -> tuple[Tensor, float]:
    """Return the queries of a KV head, bf16, and a scale of scores that undoes the magnitude."""
    shape = group_of(config), config.head_dim
    q = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * magnitude
    return q.bfloat16(), config.head_dim**-0.5 / magnitude


def copy_weights(memory: Memory, source: Any, planes: tuple[Pointer, ...]) -> None:
    """Let all warps copy the weights of the KV head."""
    weights = planes[WEIGHTS] + KV_HEAD * fragment_inputs.WEIGHTS
    for memory.warp in range(4):
        thread = lanes(range(LANES * memory.warp, LANES * (memory.warp + 1)), "int32")
        source.copy_weights(weights, lanes([0] * LANES, "int32"), thread)


@dataclass(frozen=True)
class WarpResult:
    """The online softmax of one warp: sums ``[heads, dim]``, and maxima and totals ``[heads]``."""

    sums: Tensor
    maxima: Tensor
    totals: Tensor

    @classmethod
    def of(cls, acc: Any, m: Any, totals: Any, parts: int, like: Tensor) -> Self:
        """Arrange what the lanes have as rows."""
        heads = range(len(like))
        maxima, found = (
            torch.tensor([float(np.broadcast_to(x[i % 2], LANES)[i // 2]) for i in heads])
            for x in (m, totals)
        )
        return cls(rows_of(acc, parts, like), maxima, found)


def merged(results: list[WarpResult]) -> Tensor:
    """Return attention from the results of warps."""
    most = torch.stack([result.maxima for result in results]).amax(0)
    shares = [torch.exp2(result.maxima - most) for result in results]
    total = sum(share * result.totals for share, result in zip(shares, results, strict=True))
    sums = sum(share[:, None] * result.sums for share, result in zip(shares, results, strict=True))
    assert isinstance(sums, Tensor)
    assert isinstance(total, Tensor)
    return sums / total[:, None]


def rows_of(acc: Any, parts: int, like: Tensor) -> Tensor:
    """Return fragments of C as rows; see `splits.write_split`."""
    out = torch.zeros(like.shape)
    group = len(out)
    each = out.shape[1] // parts
    for n, fragment in enumerate(acc):
        part, tile = divmod(n, each // 16)
        for lane in range(LANES):
            g, t = divmod(lane, 4)
            for i in range(4):
                head, dim = 2 * t + i % 2, part * each + g * (each // 8) + 2 * tile + i // 2
                if head < group:
                    out[head, dim] = float(fragment[i][lane])
    return out


def transformed_back(name: str, out: Tensor) -> Tensor:
    """Undo the transform of V, as the format's FINISH does."""
    from runtime.kv.k4v2.kernels import UNIT

    two_bits = UNIT.value * out.shape[1] ** -0.5
    units = {"int4": 0.5, "k4v2": two_bits, "shard": two_bits}
    return hadamard(out * units[name]) if name in units else out


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, LLAMA_3_8B) for name in ("int4", "k4v2", "fp8", "fp8-e5m2")),
        *((name, SMOLLM2_135M) for name in ("int4", "fp8")),
    ],
)
@pytest.mark.parametrize(
    ("pages", "begin", "magnitude"), [(5, 0, 1.0), (9, TILE, 1e20), (4, 0, 1e-20)]
)
def test_attention_by_one_warp(
    name: str, config: ModelConfig, pages: int, begin: int, magnitude: float
) -> None:
    """Queries of other magnitudes have the same weights, because the scale undoes them."""
    kv_format = COMPRESSED[name](config)
    assert isinstance(kv_format, QuantizedFormat)
    keys, values = (heavy_tailed(config, pages, seed).clamp(-4, 4) for seed in (1, 2))
    cache, ids = empty_cache(kv_format, pages)
    kv_format.encode_reference(keys, values, ids, cache.layer(0), ids)
    decoded = kv_format.decode(cache.layer(0), ids, ids)
    k, v = (x[:, KV_HEAD].flatten(0, 1)[begin:] for x in decoded)
    q, scale = random_queries(config, magnitude)
    found = attended(kv_format, cache, q, ids, begin, scale / math.log(2))
    expected = (q.float() @ k.T * scale).softmax(-1) @ v
    torch.testing.assert_close(transformed_back(name, found), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("pages", "begin", "magnitude", "factor"),
    [(3, 0, 1.0, 1.0), (9, TILE, 1e20, 1.0), (38, 0, 1.0, 1.2)],
)
def test_attention_over_shard(pages: int, begin: int, magnitude: float, factor: float) -> None:
    """Some warps have no page; queries are rotated anew every 512 tokens; YaRN scales keys."""
    rope = RopeConfig(scaling="yarn", factor=4.0, original_context=256, attention_factor=factor)
    config = replace(LLAMA_3_8B, num_layers=1, context_length=800, rope=rope)
    kv_format = random_shard(config)
    layer = kv_format.layer(0)
    keys, values = (heavy_tailed(config, pages, seed).clamp(-4, 4) for seed in (1, 2))
    cache, ids = empty_cache(kv_format, pages)
    first = (SINK_PAGES + torch.arange(pages)) * PAGE
    layer.encode_reference(keys, values, first, cache.layer(0), ids)
    decoded = layer.decode(cache.layer(0), ids, first)
    k, v = (x[:, KV_HEAD].flatten(0, 1)[begin:] for x in decoded)
    q, scale = random_queries(config, magnitude)
    inputs = layer.kernel_inputs().planes
    found = attended(kv_format, cache, q, ids, begin, scale / math.log(2), inputs)
    expected = (q.float() @ k.T * scale).softmax(-1) @ v
    torch.testing.assert_close(transformed_back("shard", found), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("config", [LLAMA_3_8B, SMOLLM2_135M])
@pytest.mark.parametrize(("count", "gap"), [(1, 0), (37, 0), (85, 48)])
def test_attention_to_full_precision_tokens(
    config: ModelConfig, count: int, gap: int, warps: int
) -> None:
    """Unused slots have NaN; the compressed tokens in the gap are left out."""
    length = count + gap
    pages = -(-length // PAGE)
    k, v = (heavy_tailed(config, pages + 1, seed).clamp(-4, 4) for seed in (4, 5))
    ids = torch.randperm(pages + 1, generator=torch.Generator().manual_seed(1))[:pages]
    k[ids[-1], :, (length - 1) % PAGE + 1 :] = math.nan
    v[ids[-1], :, (length - 1) % PAGE + 1 :] = math.nan
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(group_of(config), config.head_dim, generator=generator).bfloat16()
    scale = config.head_dim**-0.5
    memory = Memory()
    (queries,), (keys,), (values,) = (memory.add(x) for x in (q, k, v))
    (table,) = memory.add(ids.int())
    kernels = "runtime.kv.kernels"
    modules = f"{kernels}.fragments", f"{kernels}.splits", f"{kernels}.windowed_fragments"
    with loaded(memory, *modules) as (common, _, source):
        results = []
        for memory.warp in range(warps):
            acc, m, sums = source.attend_exact(
                queries, count, gap, keys, values, k.stride(0), KV_HEAD * k.stride(1), table,
                lanes(scale / math.log(2), "float32"), *q.shape, PAGE, SINK_PAGES, warps,
            )  # fmt: skip
            totals = [common.sum_of_rows(x) for x in sums]
            results.append(WarpResult.of(acc, m, totals, 1, q))
    found = merged(results)
    kept = [t for t in range(length) if not SINK_PAGES * PAGE <= t < SINK_PAGES * PAGE + gap]
    own_k, own_v = (x[ids, KV_HEAD].flatten(0, 1)[kept].float() for x in (k, v))
    expected = (q.float() @ own_k.T * scale).softmax(-1) @ own_v
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
