"""Attention over stored pages by one warp, emulated, against attention over decoded pages."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.kv.cache import PagedCache
from runtime.kv.gpu import page_strides
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.registry import COMPRESSED
from runtime.kv.transforms import hadamard
from tests.runtime.kv.compressed_data import LLAMA_3_8B, PAGE, heavy_tailed
from tests.runtime.kv.warp import LANES, Memory, Pointer, lanes, loaded

pytest.importorskip("triton")
GROUP, KV_HEAD, DIM = 4, 2, LLAMA_3_8B.head_dim
TILE = 64
"""A multiple of the tokens of a tile in all formats."""


def quantized(name: str) -> QuantizedFormat:
    kv_format = COMPRESSED[name](LLAMA_3_8B)
    assert isinstance(kv_format, QuantizedFormat)
    return kv_format


def attended(
    kv_format: QuantizedFormat, cache: PagedCache, q: Tensor, ids: Tensor, begin: int, scale: float
) -> Tensor:
    """Return attention to the tokens from ``begin`` on, before the transform of V is undone."""
    memory = Memory()
    by_name: dict[str, Pointer] = {}
    for tensor, each in zip(cache.tensors, cache.layout.tensors, strict=True):
        names = [plane.name for plane in each.planes]
        by_name |= zip(names, memory.add(*each.views(tensor)), strict=True)
    planes = tuple(by_name[plane.name] for plane in kv_format.planes(0, PAGE))
    (queries,), (table,) = memory.add(q), memory.add(ids.int())
    count = len(ids) * PAGE
    names = ["runtime.kv.kernels.fragments", "runtime.kv.int4.fragments"]
    if kv_format.name != "int4":
        names.append(f"runtime.kv.{kv_format.name}.fragments")
    with loaded(memory, *names) as (common, *_, source):
        acc, _, sums = source.attend(
            queries, KV_HEAD, begin, -(-count // TILE) * TILE, count, planes, table,
            lanes(scale, "float32"), GROUP, DIM, page_strides(cache.layer(0)),
        )  # fmt: skip
        totals = [common.sum_of_rows(x) for x in sums]
        return _rows_of(acc, totals, source.PARTS)


def _rows_of(acc: Any, totals: Any, parts: int) -> Tensor:
    """Return normalized fragments of C as rows; see `fragments.write_part`."""
    out, each = torch.zeros(GROUP, DIM), DIM // parts
    for n, fragment in enumerate(acc):
        part, tile = divmod(n, each // 16)
        for lane in range(LANES):
            g, t = divmod(lane, 4)
            for i in range(4):
                head, dim = 2 * t + i % 2, part * each + g * (each // 8) + 2 * tile + i // 2
                if head < GROUP:
                    out[head, dim] = float(fragment[i][lane] / totals[i % 2][lane])
    return out


def transformed_back(name: str, out: Tensor) -> Tensor:
    """Undo the transform of V, as the format's FINISH does."""
    from runtime.kv.k4v2.kernels import UNIT

    units = {"int4": 0.5, "k4v2": UNIT.value * DIM**-0.5}
    return hadamard(out * units[name]) if name in units else out


@pytest.mark.parametrize("name", ["int4", "k4v2", "fp8"])
@pytest.mark.parametrize(
    ("pages", "begin", "magnitude"), [(5, 0, 1.0), (9, TILE, 1e20), (4, 0, 1e-20)]
)
def test_attention_by_one_warp(name: str, pages: int, begin: int, magnitude: float) -> None:
    """Queries of other magnitudes have the same weights, because the scale undoes them."""
    kv_format = quantized(name)
    keys, values = (heavy_tailed(LLAMA_3_8B, pages, seed).clamp(-4, 4) for seed in (1, 2))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(pages + 2, generator=generator)[:pages]
    cache = PagedCache.of_stored(kv_format.planes(0, PAGE), pages + 2)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).fill_(0xFF)
    kv_format.encode_reference(keys, values, ids, cache.layer(0), ids)
    decoded = kv_format.decode(cache.layer(0), ids, ids)
    k, v = (x[:, KV_HEAD].flatten(0, 1)[begin:] for x in decoded)
    q = (torch.randn(GROUP, DIM, generator=generator) * magnitude).bfloat16()
    scale = DIM**-0.5 / magnitude
    found = attended(kv_format, cache, q, ids, begin, scale / math.log(2))
    expected = (q.float() @ k.T * scale).softmax(-1) @ v
    torch.testing.assert_close(transformed_back(name, found), expected, rtol=1e-2, atol=1e-2)
