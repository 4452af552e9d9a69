"""Choose a kernel plan for one model on this GPU: ``python -m runtime.offline.bench plan --help``.

For each GEMM shape, the benchmark compares torch with a few tile sizes of our kernels. For each
shape of factor pairs, it compares a decode step that uses the pairs with one that uses their
products. It prints the measured times and writes the plan to a file for `KernelPlan.load`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runtime.attention.base import Batch
from runtime.checkpoint import checkpoint_path, load_checkpoint
from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, LayerWeights
from runtime.gemm.model import build_gemm_model
from runtime.gemm.plan import (
    BUCKETS,
    KernelPlan,
    LargeTile,
    Tile,
    choice_key,
    group_key,
    large_tile,
    multiplied_out,
)
from runtime.gemm.weights import PROJECTION_GROUPS
from runtime.megakernel.decode_step import decode_step
from runtime.offline.bench.device import captured, describe, milliseconds
from runtime.offline.bench.shapes import PAGE
from runtime.pages.plan import PageCount, pages_for

if TYPE_CHECKING:
    from runtime.gemm.ops import GroupedGemm

_LAYERS = 8
"""Number of layers of one shape per measurement. Their weights do not fit into the L2 cache."""
_MAX_SHAPES = 12
"""Maximum number of layer shapes that are measured. Other layers keep their factor pairs."""
_GAIN = 0.97
"""An alternative is chosen if it takes less than this fraction of the default's time."""
_FEW_BLOCKS = 200
"""A launch with fewer blocks does not fill the device, so tiles with split-K are tried as well."""
_CONTEXT = 512
Log = Callable[[str], None]


def measure(checkpoint: Checkpoint, log: Log = print) -> KernelPlan:
    """Measure the kernels of a checkpoint on this GPU and return the fastest plan.

    Raises:
        ValueError: the GEMM backend does not support the checkpoint.
    """
    device = torch.cuda.get_device_name()
    plan = KernelPlan(dense=frozenset(_faster_dense(checkpoint, log)), device=device)
    applied = plan.multiply_out(checkpoint)
    model = build_gemm_model(applied, device="cuda", page_size=PAGE, plan=plan)
    alike: dict[str, list[GroupedGemm]] = {}
    for gemm in model.grouped_gemms():
        for bucket in BUCKETS:
            alike.setdefault(choice_key(gemm.name, bucket, gemm.shapes), []).append(gemm)
    choices = {name: _best_tile(name, some[:_LAYERS], log) for name, some in alike.items()}
    return replace(plan, choices=choices)


def _faster_dense(checkpoint: Checkpoint, log: Log) -> Iterator[str]:
    """Yield the keys of projection groups whose factor pairs are slower than their products."""
    shapes: dict[tuple[str | None, ...], LayerWeights] = {}
    for layer in checkpoint.layers:
        shapes.setdefault(tuple(group_key(layer, names) for names in PROJECTION_GROUPS), layer)
    measured = set()
    for layer in list(shapes.values())[:_MAX_SHAPES]:
        pairs_ms = None
        for names in PROJECTION_GROUPS:
            name = group_key(layer, names)
            if name is None or name in measured:
                continue
            measured.add(name)
            pairs_ms = pairs_ms or _step_ms(checkpoint, layer)
            dense_ms = _step_ms(checkpoint, multiplied_out(layer, names))
            _line(log, name, pairs=pairs_ms, dense=dense_ms)
            if dense_ms < _GAIN * pairs_ms:
                yield name


def _step_ms(checkpoint: Checkpoint, layer: LayerWeights) -> float:
    """Return the milliseconds of a decode step of one sequence through `_LAYERS` equal layers."""
    config = replace(checkpoint.config, num_layers=_LAYERS, context_length=_CONTEXT + 1)
    layers = tuple(_copied(layer) for _ in range(_LAYERS))
    part = replace(checkpoint, config=config, layers=layers)
    model = build_gemm_model(part, device="cuda", page_size=PAGE)
    pages = pages_for(_CONTEXT + 1, PAGE)
    batch = Batch.static(1, pages, "cuda")
    batch.page_table.copy_(torch.arange(pages)[None])
    batch.positions.fill_(_CONTEXT)
    batch.lengths.fill_(_CONTEXT + 1)
    return milliseconds(captured(decode_step(model, batch, model.new_cache(PageCount(pages)))))


def _copied(layer: LayerWeights) -> LayerWeights:
    """Return a layer copied to the GPU."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("cuda", torch.bfloat16, copy=True)
        if isinstance(value, Dense | FactorPair):
            return replace(value, **{name: copied(part) for name, part in vars(value).items()})
        return value

    return replace(layer, **{name: copied(value) for name, value in vars(layer).items()})


def _best_tile(name: str, alike: Sequence["GroupedGemm"], log: Log) -> Tile | LargeTile | None:
    """Return the fastest tile for GEMMs of one shape, or None if torch should be used.

    The GEMMs are measured together, one after the other.
    """
    from runtime.gemm.epilogues import Epilogue  # imports Triton

    first = alike[0]
    tokens = int(name.split()[1].rstrip(":"))
    if not first.same_input:
        return None
    x = torch.randn(tokens, first.columns, dtype=torch.bfloat16, device="cuda")
    hidden = None
    if first.epilogue is Epilogue.RESIDUAL:
        hidden = x.new_zeros(tokens, first.shapes[0][0])

    def ms(tile: Tile | LargeTile | None) -> float:
        def run() -> None:
            for gemm in alike:
                if tile is None:
                    gemm.run_torch(x, x, hidden)
                else:
                    gemm.run_kernel(x, hidden, tile)

        return milliseconds(captured(run)) / len(alike)

    torch_ms = ms(None)
    ours_ms, tile = min((ms(tile), n, tile) for n, tile in enumerate(_tiles(tokens, first)))[::2]
    _line(log, name, torch=torch_ms, ours=ours_ms)
    return tile if ours_ms < _GAIN * torch_ms else None


def _tiles(tokens: int, gemm: "GroupedGemm") -> Iterator[Tile | LargeTile]:
    """Yield tiles that were fast on an H200.

    If the launch would have fewer than `_FEW_BLOCKS` blocks, also yield tiles that split the
    columns (split-K).
    """
    from runtime.gemm.epilogues import Epilogue  # imports Triton

    if tokens > 64:
        wanted = large_tile(gemm.name, tokens, gemm.shapes)
        if wanted is not None:
            yield from {wanted, LargeTile(2, 128), LargeTile(2, 256)}
    if tokens > 128:
        return
    high = min(tokens, 64)
    if gemm.epilogue is Epilogue.GATED:
        yield Tile(high, 64, 128 if high < 32 else 64, 1, 4, 4 if high < 32 else 6)
        return
    rows = sum(rows for rows, _ in gemm.shapes)
    for wide, columns, stages in ((32, 128, 5), (64, 64, 6)):
        yield Tile(high, wide, columns, 1, 4, stages)
        if -(-tokens // high) * (rows // wide) < _FEW_BLOCKS:
            yield Tile(high, wide, columns, 4, 4, stages)


def _line(log: Log, name: str, **figures: float) -> None:
    log(f"{name:72} " + ", ".join(f"{what} {1e3 * ms:.1f} us" for what, ms in figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench plan")
    parser.add_argument("--model", default="smollm2-135m", help="name or path of a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    own = parser.parse_args()
    print(describe("cuda"))
    checkpoint = load_checkpoint(checkpoint_path(own.model), dtype=torch.bfloat16)
    with torch.inference_mode():
        plan = measure(checkpoint)
    plan.save(own.out)
    print(f"kernel plan {plan.hash}: {own.out}")
