"""Decode step of a whole model, in each implementation: ``python -m runtime.offline.bench decode
--help``.

The floor is the time to read weights and KV once, at the measured rate of a copy (bytes read plus
bytes written). The peer is transformers with a static cache and the same weights, eager and
compiled.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.checkpoint.weights import Checkpoint
from runtime.gemm.model import build_gemm_model
from runtime.gemm.weights import PackedWeights
from runtime.graphs.capture import capture
from runtime.kv.cache import PagedCache
from runtime.megakernel.decode_step import decode_step, unsupported_by_megakernel
from runtime.offline.bench import peers as transformers_peers
from runtime.offline.bench.device import Figure, captured, copy_rate, describe, milliseconds, show
from runtime.offline.bench.shapes import PAGE, SHAPES, kv_bytes, random_checkpoint, title
from runtime.pages.groups import Part
from runtime.pages.plan import pages_for


class DecodeBench:
    """Benchmark of all implementations of one model's decode step."""

    def __init__(self, checkpoint: Checkpoint, device: str, kv_format: str = "dense") -> None:
        self._device = device
        self.model = build_gemm_model(
            checkpoint, device=device, page_size=PAGE, kv_format=kv_format
        )

    def figures(
        self, name: str, batch: int, context: int, rate: float, runs: int
    ) -> Iterator[Figure]:
        """Measure a step as the megakernel (if supported), one CUDA graph, and one graph per layer.

        Args:
            rate: bandwidth of a copy, in bytes per millisecond.
        """
        pages = pages_for(context + 1, PAGE)  # pages of a sequence
        cache = self._cache(batch * pages)
        inputs = Batch.static(batch, pages, self._device)
        plan = cache.layout.plan
        if len(plan.groups) > 1:
            inputs = replace(inputs, page_tables=(inputs.page_table,) * len(plan.groups))
        inputs.page_table.copy_(torch.randperm(batch * pages).view(batch, pages))
        inputs.positions.fill_(context)
        inputs.lengths.fill_(context + 1)
        kv_read = cache.layout.page_bytes.of(plan.received(context + 1))
        read = self.model.step_weight_bytes + batch * kv_read
        ways: dict[str, Callable[[], Tensor]] = {}
        megakernel = self._device == "cuda" and unsupported_by_megakernel(self.model) is None
        if megakernel and batch <= _most_sequences(self.model.weights, cache):
            ways["megakernel"] = decode_step(self.model, inputs, cache)
        ways["layer by layer"] = partial(self.model.forward, inputs, cache)
        calls = {way: captured(step, device=self._device) for way, step in ways.items()}
        calls["a graph for each layer"] = self._by_layer(inputs, cache)
        for way, call in calls.items():
            took = milliseconds(call, device=self._device, runs=runs)
            yield Figure(f"{name}, {way}", took, read / rate)

    def _by_layer(self, inputs: Batch, cache: PagedCache) -> Callable[[], None]:
        calls: list[Callable[[], object]] = [*self.model.stages(inputs, cache)]
        if self._device == "cuda":
            # Each stage reads the output of the previous one.
            calls = [capture(stage) for stage in calls]

        def run() -> None:
            for call in calls:
                call()

        return run

    def _cache(self, pages: int) -> PagedCache:
        plan = self.model.layout.plan
        cache = self.model.new_cache(plan.each(pages))
        for (_, plane), tensor in zip(cache.layout.planes, cache.planes, strict=True):
            if plane.group.part is not Part.MIDDLE:
                tensor.normal_()
        return cache


def _most_sequences(weights: PackedWeights, cache: PagedCache) -> int:
    """Return the largest batch for which the megakernel is used."""
    from runtime.megakernel.launch import most_sequences

    return most_sequences(weights, 1, attends=not cache.layout.plan.encodes)


def figures(
    shape: str,
    keeps: Sequence[float],
    ragged: int,
    cases: Sequence[tuple[int, int]],
    *,
    kv_formats: Sequence[str] = ("dense",),
    peers: bool,
    device: str,
    runs: int,
) -> Iterator[Figure]:
    """Measure our steps, then the peers.

    Args:
        cases: pairs of batch size and context length.
        kv_formats: KV formats to measure, see `create_format`.
        ragged: variation of ranks between layers; see `random_checkpoint`.
    """
    rate = copy_rate(device)
    yield Figure("copy rate, GB/s", rate / 1e6, rate / 1e6)
    for keep in keeps:
        checkpoint = random_checkpoint(SHAPES[shape], keep, ragged, device)
        named = {
            case: f"{title(shape, keep, ragged)}, batch {case[0]}, context {case[1]}"
            for case in cases
        }
        for kv_format in kv_formats:
            bench = DecodeBench(checkpoint, device, kv_format)
            kind = "" if kv_format == "dense" else f", {kv_format.partition(':')[0]}"
            for case, name in named.items():
                yield from bench.figures(name + kind, *case, rate, runs)
        if not peers:
            continue
        model = transformers_peers.build(checkpoint)
        for (batch, context), name in named.items():
            read = bench.model.step_weight_bytes + kv_bytes(
                checkpoint.config, batch * (context + 1)
            )
            for compiled in (False, True):
                peer = transformers_peers.decode_step(model, context, batch, compiled=compiled)
                took = milliseconds(peer.run, peer.reset, device=device, runs=runs)
                kind = "compiled" if compiled else "eager"
                yield Figure(f"{name}, transformers {kind}", took, read / rate)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench decode")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-7b", help="model shape")
    parser.add_argument(
        "--keep",
        type=float,
        nargs="+",
        default=[0.5, 1.0],
        help="fractions of parameters that factor pairs keep; 1 for dense",
    )
    parser.add_argument("--ragged", type=int, default=0, help="variation of ranks between layers")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="numbers of sequences")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[512], help="context lengths in tokens"
    )
    parser.add_argument("--kv-formats", nargs="+", default=["dense"], help="NAME or NAME:FILE")
    parser.add_argument("--peers", action="store_true", help="also measure transformers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=30, help="timed runs of each call")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with torch.inference_mode():
        cases = list(product(args.batch, args.context))
        rows = figures(
            args.shape, args.keep, args.ragged, cases, kv_formats=args.kv_formats,
            peers=args.peers, device=args.device, runs=args.runs,
        )  # fmt: skip
        show(describe(args.device), rows, args.json)
