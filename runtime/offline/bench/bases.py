"""Memory of weights whose layers share bases: ``python -m runtime.offline.bench bases --help``.

As in Basis Sharing (arXiv 2410.03765), consecutive layers share the V of the linears that do not
write to the residual stream. The sizes are those of `PackedWeights` on rank 0, computed from shapes
on the meta device: bytes in memory, bytes in memory if each layer has its own copy of V, and bytes
that a decode step reads. On a GPU, random weights are also packed, and the memory of their tensors
is printed.
"""

import argparse
import gc
from dataclasses import replace

import torch

from runtime.checkpoint.weights import Checkpoint, layer_shapes, shapes_of
from runtime.gemm.weights import PackedWeights
from runtime.offline.bench.ranks import rank_part
from runtime.offline.bench.shapes import SHAPES, random_checkpoint, title, without_content
from runtime.parallel.partition import Partition


def sizes(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Return bytes in memory, in memory without sharing, and read by a decode step.

    Layers on demand are not read.
    """
    shapes = replace(checkpoint, layers=shapes_of(layer_shapes(checkpoint)))
    shared = PackedWeights.pack(shapes, "meta")
    copies = PackedWeights.pack(without_content(shapes), "meta")
    return shared.nbytes, copies.nbytes, shared.step_weight_bytes


def part_of(checkpoint: Checkpoint, ranks: int) -> Checkpoint:
    """Return the part of rank 0."""
    if ranks == 1:
        return checkpoint
    return rank_part(checkpoint, Partition.of(checkpoint.config, 0, ranks))


def allocated() -> int:
    """Return the bytes of tensors on the GPU."""
    gc.collect()
    return torch.cuda.memory_allocated()


def row(shape: str, keep: float, group: int, ranks: int, device: str) -> str:
    """Return one row of the table."""
    before = allocated() if device == "cuda" else 0
    config = SHAPES[shape]
    whole = random_checkpoint(config, keep, device=device, on_demand=True, group=group)
    part = part_of(whole, ranks)
    del whole
    cells = [f"{size / 1e9:.3f}" for size in sizes(part)]
    if device == "cuda":
        weights = PackedWeights.pack(part, device)
        del part
        cells.append(f"{(allocated() - before) / 1e9:.3f}")
        del weights
    name = f"{title(shape, keep)}, {group} layers share V, T = {ranks}"
    return f"{name:56} " + " ".join(f"{cell:>9}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench bases")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-7b", help="model shape")
    parser.add_argument(
        "--keep",
        type=float,
        nargs="+",
        default=[0.8, 0.5],
        help="fractions of parameters that factor pairs keep",
    )
    parser.add_argument(
        "--group", type=int, nargs="+", default=[2], help="numbers of layers that share a V"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    args = parser.parse_args()
    columns = ["in memory", "copied", "step", *(["allocated"] if args.device == "cuda" else [])]
    print(f"{'GB':56} " + " ".join(f"{column:>9}" for column in columns))
    for keep in args.keep:
        for group in args.group:
            for ranks in args.ranks:
                print(row(args.shape, keep, group, ranks, args.device), flush=True)
