"""Decode megakernel alone, by ring size: ``python -m runtime.offline.bench step --help``.

The ring is the shared-memory buffer into which tiles of weights, K and V are prefetched.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.gemm.weights import PackedWeights
from runtime.layers.rope import cos_sin_table
from runtime.offline.bench.device import Figure, captured, copy_rate, describe, milliseconds, show
from runtime.offline.bench.shapes import PAGE, SHAPES, kv_bytes, random_checkpoint, title
from runtime.pages.plan import pages_for


def figures(
    shape: str,
    keeps: Sequence[float],
    ragged: int,
    cases: Sequence[tuple[int, int]],
    rings: Sequence[tuple[int, int]],
) -> Iterator[Figure]:
    """Measure every case with every ring.

    Args:
        cases: pairs of batch size and context length.
        rings: pairs of the number of ring slots and the number of tiles in flight.
    """
    from runtime.megakernel.launch import DecodeStep

    config = SHAPES[shape]
    copied = copy_rate()
    yield Figure("copy rate, GB/s", copied / 1e6, copied / 1e6)
    cos, sin = cos_sin_table(config, config.context_length)
    rope = cos.cuda(), sin.cuda()
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    for keep in keeps:
        weights = PackedWeights.pack(random_checkpoint(config, keep, ragged), "cuda")
        for batch, context in cases:
            pages = pages_for(context + 1, PAGE)  # pages of a sequence
            size = (batch * pages, config.num_kv_heads, PAGE, config.head_dim)
            planes: list[Tensor] = [
                torch.randn(size, dtype=torch.bfloat16, device="cuda")
                for _ in range(2 * config.num_layers)
            ]
            inputs = Batch.static(batch, pages, "cuda")
            inputs.page_table.copy_(torch.randperm(batch * pages).view(batch, pages))
            inputs.positions.fill_(context)
            inputs.lengths.fill_(context + 1)
            floor = (weights.step_weight_bytes + kv_bytes(config, batch * (context + 1))) / copied
            for slots, ahead in rings:
                step = DecodeStep(
                    weights, planes, rope, inputs, programs=programs, slots=slots, ahead=ahead
                )
                name = f"{title(shape, keep, ragged)}, batch {batch}, context {context}"
                took = milliseconds(captured(step.launch))
                yield Figure(f"{name}, {slots} slots, {ahead} ahead", took, floor)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench step")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-7b", help="model shape")
    parser.add_argument(
        "--keep",
        type=float,
        nargs="+",
        default=[0.5],
        help="fractions of parameters that factor pairs keep; 1 for dense",
    )
    parser.add_argument("--ragged", type=int, default=0, help="variation of ranks between layers")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="numbers of sequences")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[512], help="context lengths in tokens"
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[5], help="numbers of ring slots")
    parser.add_argument(
        "--ahead", type=int, nargs="+", default=[1], help="numbers of tiles in flight"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with torch.inference_mode():
        cases = list(product(args.batch, args.context))
        rings = list(product(args.slots, args.ahead))
        show(describe("cuda"), figures(args.shape, args.keep, args.ragged, cases, rings), args.json)
