"""A kernel plan for one model on this GPU: ``python -m runtime.bench plan --help``.

What was measured is printed, and written for `KernelPlan.load`: of each kind of products torch
beside a few tiles of our kernels, and of each kind of factor pairs the launch of a step with them
beside one with their product.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime.attention.base import Batch
from runtime.bench.device import captured, describe, milliseconds
from runtime.bench.shapes import PAGE
from runtime.checkpoint import load_checkpoint, resolve_model
from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, LayerWeights
from runtime.gemm.epilogues import Kind
from runtime.gemm.ops import Products
from runtime.gemm.plan import (
    BUCKETS,
    KernelPlan,
    LargeTile,
    Tile,
    group_key,
    key,
    large_tile,
    multiplied_out,
)
from runtime.gemm.weights import GROUPS, StepWeights
from runtime.layers.rope import cos_sin_table
from runtime.megakernel.launch import DecodeStep
from runtime.models.model import Model

_LAYERS = 8
"""Of a kind, that are measured together: more than an L2 holds, for models that matter."""
_KINDS = 12
"""Of layers, at most; with ragged ranks the rest keep their factor pairs."""
_GAIN = 0.97
"""Of torch's time, or of that of factor pairs, that something else must not need."""
_FEW = 200
"""Blocks that do not fill a device."""
_CONTEXT = 512
Log = Callable[[str], None]


def measure(checkpoint: Checkpoint, log: Log = print) -> KernelPlan:
    """Raises ValueError for a model whose step is not one launch."""
    device = torch.cuda.get_device_name()
    plan = KernelPlan(dense=frozenset(_better_dense(checkpoint, log)), device=device)
    model = Model(plan.applied(checkpoint), device="cuda", page_size=PAGE, stepped=True, plan=plan)
    alike: dict[str, list[Products]] = {}
    for products in model.step_products():
        for bucket in BUCKETS:
            name = key(products.name, bucket, products.shapes)
            alike.setdefault(name, []).append(products)
    choices = {name: _best_tile(name, some[:_LAYERS], log) for name, some in alike.items()}
    return replace(plan, choices=choices)


def _better_dense(checkpoint: Checkpoint, log: Log) -> Iterator[str]:
    """Names of the groups of factor pairs whose product makes a step faster."""
    kinds: dict[tuple[str | None, ...], LayerWeights] = {}
    for layer in checkpoint.layers:
        kinds.setdefault(tuple(group_key(layer, names) for names in GROUPS), layer)
    asked = set()
    for layer in list(kinds.values())[:_KINDS]:
        as_it_is = None
        for names in GROUPS:
            name = group_key(layer, names)
            if name is None or name in asked:
                continue
            asked.add(name)
            as_it_is = as_it_is or _step_ms(checkpoint, layer)
            dense = _step_ms(checkpoint, multiplied_out(layer, names))
            _line(log, name, pairs=as_it_is, dense=dense)
            if dense < _GAIN * as_it_is:
                yield name


def _step_ms(checkpoint: Checkpoint, layer: LayerWeights) -> float:
    """A step of one sequence through `_LAYERS` layers like this one."""
    config = replace(checkpoint.config, num_layers=_LAYERS)
    layers = tuple(_copied(layer) for _ in range(_LAYERS))
    weights = StepWeights.of(replace(checkpoint, config=config, layers=layers), "cuda")
    pages = -(-(_CONTEXT + 1) // PAGE)
    size = pages, config.num_kv_heads, PAGE, config.head_dim
    planes = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(2 * _LAYERS)]
    rope = cos_sin_table(config, _CONTEXT + 1)
    batch = Batch.static(1, pages, "cuda")
    batch.page_table.copy_(torch.arange(pages)[None])
    batch.positions.fill_(_CONTEXT)
    batch.lengths.fill_(_CONTEXT + 1)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    step = DecodeStep(weights, planes, (rope[0].cuda(), rope[1].cuda()), batch, programs=programs)
    return milliseconds(captured(step.launch))


def _copied(layer: LayerWeights) -> LayerWeights:
    """On the GPU, in memory of its own."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("cuda", torch.bfloat16, copy=True)
        if isinstance(value, Dense | FactorPair):
            return replace(value, **{name: copied(part) for name, part in vars(value).items()})
        return value

    return replace(layer, **{name: copied(value) for name, value in vars(layer).items()})


def _best_tile(name: str, alike: Sequence[Products], log: Log) -> Tile | LargeTile | None:
    """The fastest way for some products, one after the other; None: torch's."""
    first, tokens = alike[0], int(name.split()[1].rstrip(":"))
    if not first.together:
        return None
    x = torch.randn(tokens, first.columns, dtype=torch.bfloat16, device="cuda")
    hidden = None
    if first.kind is Kind.RESIDUAL:
        hidden = x.new_zeros(tokens, first.shapes[0][0])

    def ms(tile: Tile | LargeTile | None) -> float:
        def run() -> None:
            for products in alike:
                if tile is None:
                    products.by_torch(x, x, hidden)
                else:
                    products.by_kernel(x, hidden, tile)

        return milliseconds(captured(run)) / len(alike)

    torchs = ms(None)
    ours, tile = min((ms(tile), n, tile) for n, tile in enumerate(_tiles(tokens, first)))[::2]
    _line(log, name, torch=torchs, ours=ours)
    return tile if ours < _GAIN * torchs else None


def _tiles(tokens: int, products: Products) -> Iterator[Tile | LargeTile]:
    """A few that were fast on an H200; columns are split where there are few rows."""
    if tokens > 64:
        wanted = large_tile(products.name, tokens, products.shapes)
        if wanted is not None:
            yield from {wanted, LargeTile(2, 128), LargeTile(2, 256)}
    if tokens > 128:
        return
    high = min(tokens, 64)
    if products.kind is Kind.GATED:
        yield Tile(high, 64, 128 if high < 32 else 64, 1, 4, 4 if high < 32 else 6)
        return
    rows = sum(rows for rows, _ in products.shapes)
    for wide, columns, stages in ((32, 128, 5), (64, 64, 6)):
        yield Tile(high, wide, columns, 1, 4, stages)
        if -(-tokens // high) * (rows // wide) < _FEW:
            yield Tile(high, wide, columns, 4, 4, stages)


def _line(log: Log, name: str, **figures: float) -> None:
    log(f"{name:72} " + ", ".join(f"{what} {1e3 * ms:.1f} us" for what, ms in figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.bench plan")
    parser.add_argument("--model", default="smollm2-135m", help="name or path of a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    own = parser.parse_args()
    print(describe("cuda"))
    checkpoint = load_checkpoint(resolve_model(own.model), dtype=torch.bfloat16)
    with torch.inference_mode():
        plan = measure(checkpoint)
    plan.save(own.out)
    print(f"kernel plan {plan.hash}: {own.out}")
