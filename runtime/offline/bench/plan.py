"""Choose a kernel plan for one model on this GPU: ``python -m runtime.offline.bench plan --help``.

For each GEMM shape of each rank, the benchmark compares torch with a few tile sizes of our kernels.
For each shape of factor pairs, it compares a decode step that uses the pairs with one that uses
their products; for several ranks, also the schemes by which they divide the model. It prints the
measured times and writes the plan to a file for `KernelPlan.load`.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runtime.checkpoint import checkpoint_path, load_checkpoint
from runtime.checkpoint.slices import rank_checkpoint
from runtime.checkpoint.weights import Checkpoint, layer_shapes
from runtime.gemm.model import build_gemm_model
from runtime.gemm.plan import (
    BUCKETS,
    PROGRAMS,
    KernelPlan,
    LargeTile,
    Tile,
    choice_key,
    large_tile,
)
from runtime.kernels.alignment import VECTOR_ELEMENTS
from runtime.offline.bench.device import captured, describe, milliseconds
from runtime.offline.bench.ranks import SilentGroup
from runtime.offline.bench.shapes import PAGE, with_random_weights, without_content
from runtime.offline.bench.variants import (
    GAIN,
    LAYERS,
    Log,
    Shape,
    log_times,
    shape_of,
    with_variants,
)
from runtime.parallel.partition import Partition, Scheme

if TYPE_CHECKING:
    from runtime.gemm.ops import GroupedGemm

_FEW_BLOCKS = 200
"""A launch with fewer blocks does not fill the device, so tiles with split-K are tried as well."""


def measure(checkpoint: Checkpoint, sizes: Sequence[int] = (1,), log: Log = print) -> KernelPlan:
    """Measure the kernels of a checkpoint on this machine and return the fastest plan.

    Only shapes are read of the checkpoint; the weights are random.

    Args:
        sizes: numbers of ranks of the workers that use the plan. Products and scheme are measured
            only for numbers up to that of the GPUs.

    Raises:
        ValueError: the GEMM backend does not support the checkpoint.
    """
    whole = without_content(checkpoint)
    gpus = torch.cuda.device_count()
    for size in sizes:
        if size > gpus:
            log(f"{size} ranks need as many GPUs to measure products and scheme; there are {gpus}")
    plan = KernelPlan(device=torch.cuda.get_device_name())
    plan = with_variants(plan, whole, [size for size in sizes if size <= gpus], log)
    gemms = gemms_by_choice(plan, whole, sizes, "cuda")
    return replace(plan, choices={name: _best_tile(name, alike, log) for name, alike in gemms})


def gemms_by_choice(
    plan: KernelPlan, whole: Checkpoint, sizes: Sequence[int], device: str
) -> Iterator[tuple[str, Sequence["GroupedGemm"]]]:
    """Yield the key of each choice and up to `LAYERS` GEMMs of its shape, of any rank.

    One rank at a time is on the device, without the ranks whose layers have the same shapes. The
    GEMMs are those of its part of the model: its collectives exchange nothing.
    """
    applied = plan.multiply_out(whole)
    few = _few_of_each_shape(layer_shapes(applied))
    config = replace(whole.config, num_layers=len(few))
    yielded: set[str] = set()
    model_of_few = replace(applied, config=config, layers=few)
    for rank, size, part in distinct_parts(model_of_few, sizes, plan.scheme):
        if size > 1 and plan.scheme is Scheme.BASE:
            continue
        model = build_gemm_model(
            with_random_weights(part, device),
            device=device,
            page_size=PAGE,
            group=SilentGroup(rank, size),
        )
        alike: dict[str, list[GroupedGemm]] = {}
        for gemm in model.grouped_gemms():
            for bucket in BUCKETS:
                alike.setdefault(choice_key(gemm.name, bucket, gemm.shapes), []).append(gemm)
        yield from ((name, some[:LAYERS]) for name, some in alike.items() if name not in yielded)
        yielded |= alike.keys()


def distinct_parts(
    whole: Checkpoint, sizes: Sequence[int], scheme: Scheme = Scheme.LOW_RANK
) -> Iterator[tuple[int, int, Checkpoint]]:
    """Yield rank, number of ranks and part of ranks whose parts have different shapes.

    Raises:
        ValueError: a number of ranks cannot divide the model.
    """
    shapes = set()
    for size in sizes:
        for rank in range(size):
            part = whole
            if size > 1:
                part = rank_checkpoint(whole, Partition.of(whole.config, rank, size, scheme))
            shape = size, tuple(map(shape_of, layer_shapes(part)))
            if shape not in shapes:
                shapes.add(shape)
                yield rank, size, part


def _few_of_each_shape(layers: Sequence[Any]) -> tuple[Any, ...]:
    """Return up to `LAYERS` layers of each shape."""
    count: Counter[Shape] = Counter()
    few = []
    for layer in layers:
        count[shape_of(layer)] += 1
        if count[shape_of(layer)] <= LAYERS:
            few.append(layer)
    return tuple(few)


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
    log_times(log, name, torch=torch_ms, ours=ours_ms)
    return tile if ours_ms < GAIN * torch_ms else None


def _tiles(tokens: int, gemm: "GroupedGemm") -> Iterator[Tile | LargeTile]:
    """Yield tiles that were fast on an H200.

    If the launch would have fewer than `_FEW_BLOCKS` blocks, also yield tiles that split the
    columns (split-K).
    """
    from runtime.gemm.epilogues import Epilogue  # imports Triton

    yield from _tiles_of_few_tokens(tokens, gemm)
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


def _tiles_of_few_tokens(tokens: int, gemm: "GroupedGemm") -> Iterator[LargeTile]:
    """Yield tiles of one consumer warp group, with splits if they leave programs without work."""
    from runtime.gemm.epilogues import Epilogue  # imports Triton

    if tokens > 128 or any(rows % VECTOR_ELEMENTS for rows, _ in gemm.shapes):
        return
    gated = gemm.epilogue is Epilogue.GATED
    shapes = gemm.shapes[:1] if gated else gemm.shapes
    for rows in (128, 64, 32):
        if gemm.epilogue is Epilogue.RESIDUAL and rows < 64:
            continue
        yield LargeTile(1, rows)
        each = rows // 2 if gated else rows
        blocks = -(-tokens // 64) * sum(-(-n // each) for n, _ in shapes)
        if gemm.epilogue is Epilogue.PLAIN and 2 * blocks <= PROGRAMS:
            yield LargeTile(1, rows, 1 << min(PROGRAMS // blocks, 8).bit_length() - 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench plan")
    parser.add_argument("--model", default="smollm2-135m", help="name or path of a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[1], help="numbers of ranks of the workers"
    )
    own = parser.parse_args()
    print(describe("cuda"))
    checkpoint = load_checkpoint(checkpoint_path(own.model), dtype=None)
    with torch.inference_mode():
        plan = measure(checkpoint, own.tp)
    plan.save(own.out)
    print(f"kernel plan {plan.hash}: {own.out}")
