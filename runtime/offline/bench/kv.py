"""Decode attention by KV format: ``python -m runtime.offline.bench kv --help``.

Several layers are measured in one CUDA graph, so that their KV exceeds the L2 cache; times are
those of one layer. The floor is the time to read K and V once, at the measured rate of a copy. The
last column is the time of dense attention divided by the format's. Encoding has two rows: all pages
of the prompts that are not recent, in one launch for all layers; and the pages that leave the
windows in a decode step, one of each sequence whose length is a multiple of the page size.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.config import ModelConfig
from runtime.kv.dense import DenseFormat
from runtime.kv.format import Plane
from runtime.kv.windowed import compressed_cache
from runtime.offline.bench.device import Figure, captured, copy_rate, describe, milliseconds, show
from runtime.offline.bench.kv_formats import FORMATS, RANKS, measured_format
from runtime.offline.bench.shapes import PAGE, SHAPES
from runtime.pages.plan import pages_for
from runtime.pages.window import SINK_PAGES, first_recent

_SHORTEST, _LONGEST = 1.6 / 6.3, 14.1 / 6.3
"""Minimum and maximum length of arXiv prompts divided by their mean, from table 6 of "FDC: Fast KV
Dimensionality Compression for Efficient LLM Inference".
"""
_SPREAD = 0.5
"""Standard deviation of the logarithm of prompt lengths."""


@dataclass(frozen=True)
class Compared(Figure):
    """A figure and the time of dense attention divided by its time; 0 where this has no meaning."""

    speedup: float = 0.0

    def __str__(self) -> str:
        speedup = f"{self.speedup:8.2f}x" if self.speedup else ""
        return super().__str__() + speedup


def arxiv_lengths(batch: int, mean: int, seed: int) -> list[int]:
    """Return lengths of sequences with the range of arXiv prompts, scaled to a mean.

    They have a lognormal distribution between the shortest and the longest prompt.
    """
    drawn = np.random.default_rng(seed).lognormal(sigma=_SPREAD, size=batch)
    clipped = np.clip(drawn, _SHORTEST, _LONGEST)
    lengths: list[int] = (clipped * (batch * mean / clipped.sum())).astype(int).tolist()
    lengths[-1] += batch * mean - sum(lengths)
    return lengths


class KVBench:
    """Benchmark of one batch of decoding sequences.

    Args:
        lengths: length of each sequence.
        title: name of the batch.
        layers: layers that are measured together.
        rate: bandwidth of a copy, in bytes per millisecond.
    """

    def __init__(
        self,
        config: ModelConfig,
        lengths: Sequence[int],
        title: str,
        layers: int,
        rate: float,
        device: str,
        runs: int,
    ) -> None:
        self._config = replace(config, context_length=max(lengths), num_layers=layers)
        self._lengths = lengths
        self._title = title
        self._layers = layers
        self._rate = rate
        self._runs = runs
        self._device = torch.device(device)
        batch = len(lengths)
        counts = [pages_for(length, PAGE) for length in lengths]
        self._pages = sum(counts)
        self._inputs = Batch.static(batch, max(counts), device)
        ids = torch.split(torch.randperm(self._pages), counts)
        for row, own in zip(self._inputs.page_table, ids, strict=True):
            row[: len(own)] = own
        self._inputs.lengths.copy_(torch.tensor(lengths))
        self._inputs.positions.copy_(self._inputs.lengths - 1)
        shape = self._pages, config.num_kv_heads, PAGE, config.head_dim
        self._exact = [tuple(self._random(*shape) for _ in range(2)) for _ in range(layers)]
        self._q = self._random(batch, config.num_heads, config.head_dim)
        self._dense_ms = 0.0

    def dense(self) -> Iterator[Figure]:
        """Measure format `dense`."""
        layer = DenseFormat.create(self._config, self._device, torch.bfloat16).layer(0)
        calls = [
            lambda planes=planes: layer.attend(self._q, planes, self._inputs)
            for planes in self._exact
        ]
        self._dense_ms = self._time(calls)
        floor = sum(self._lengths) * self._exact_bytes / self._rate
        yield Compared(f"{self._title}, dense", self._dense_ms, floor, 1.0)

    def compressed(
        self, name: str, ranks: Mapping[str, Sequence[int]], options: Mapping[str, Any]
    ) -> Iterator[Figure]:
        """Measure a compressed format; see `measured_format`."""
        from runtime.kv.layers_encoder import LayersEncoder  # optional: Triton

        made = measured_format(name, self._config, ranks, options, self._device)
        table = self._inputs.page_table.long()
        recent = [first_recent(length, PAGE) for length in self._lengths]
        old = torch.cat([row[SINK_PAGES:end] for row, end in zip(table, recent, strict=True)])
        first = torch.cat([torch.arange(SINK_PAGES, end) for end in recent]) * PAGE
        first = first.to(self._device)
        layers = [
            (kernels, (*exact, *self._stored(planes)))
            for kernels, exact, planes in zip(made.kernels, self._exact, made.planes, strict=True)
        ]
        batch = replace(self._inputs, page_tables=(self._inputs.page_table,) * 2)
        encoder = LayersEncoder(layers)
        encoded_ms = self._time([partial(encoder.encode, old, old, first)]) / self._layers
        attended_ms = self._time([partial(of.attend, self._q, x, batch) for of, x in layers])
        leaving_ms = self._time([partial(of.encode_leaving, x, batch) for of, x in layers])
        stored_tokens = len(old) * PAGE
        exact_tokens = sum(self._lengths) - stored_tokens
        read = stored_tokens * made.read_bytes + exact_tokens * self._exact_bytes
        title = f"{self._title}, {name}, {made.stored_bytes:.0f} B"
        yield Compared(title, attended_ms, read / self._rate, self._dense_ms / attended_ms)
        moved = stored_tokens * (made.stored_bytes + self._exact_bytes)
        yield Compared(f"{title}, encode prompts", encoded_ms, moved / self._rate)
        yield Compared(f"{title}, encode leaving pages", leaving_ms, 0.0)

    @property
    def _exact_bytes(self) -> int:
        return 4 * self._config.num_kv_heads * self._config.head_dim  # of a token

    def _stored(self, planes: Sequence[Plane]) -> tuple[Tensor, ...]:
        return compressed_cache(planes, self._pages, self._device).layer(0)

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_()

    def _time(self, calls: Sequence[Callable[[], object]]) -> float:
        """Run the calls as one CUDA graph; return the time per call in milliseconds."""

        def run() -> None:
            for call in calls:
                call()

        graph = captured(run, device=self._device.type)
        return milliseconds(graph, device=self._device.type, runs=self._runs) / len(calls)


def figures(
    shape: str,
    cases: Sequence[tuple[int, int]],
    formats: Sequence[str],
    ranks: Mapping[str, Sequence[int]],
    options: Mapping[str, Any],
    *,
    layers: int,
    device: str,
    runs: int,
    ragged: Sequence[int] = (),
) -> Iterator[Figure]:
    """Measure dense attention, then each format, in each case.

    Args:
        cases: pairs of batch size and mean length.
        ranks: ranks by format.
        options: fields of `KernelSource` to replace.
        ragged: seeds of `arxiv_lengths`; if empty, all sequences have equal lengths.
    """
    rate = copy_rate(device)
    yield Figure("copy rate, GB/s", rate / 1e6, rate / 1e6)
    for batch, context in cases:
        title = f"batch {batch}, context {context}"
        batches = [([context] * batch, title)]
        if ragged:
            batches = [(arxiv_lengths(batch, context, s), f"{title}, seed {s}") for s in ragged]
        for lengths, name in batches:
            bench = KVBench(SHAPES[shape], lengths, name, layers, rate, device, runs)
            yield from bench.dense()
            for kv_format in formats:
                yield from bench.compressed(kv_format, ranks, options)


def case(text: str) -> tuple[int, int]:
    """Parse ``BxC``: the number of sequences and their length.

    Raises:
        ValueError: the text has another form.
    """
    batch, context = map(int, text.split("x"))
    return batch, context


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    made = argparse.ArgumentParser(prog="python -m runtime.offline.bench kv")
    made.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b", help="model shape")
    made.add_argument(
        "--cases", type=case, nargs="+", default=[(16, 8192), (4, 32_768)], metavar="BxC",
        help="numbers of sequences and their (mean) lengths in tokens",
    )  # fmt: skip
    made.add_argument(
        "--ragged", type=int, nargs="+", default=(), metavar="SEED",
        help="draw lengths with the range of arXiv prompts, once for each seed",
    )  # fmt: skip
    for name, text in (
        ("fdc", "ranks of K and then of V of the KV heads, repeated as often as necessary"),
        ("palu", "rank of K and rank of V per KV head"),
        ("shard", "coefficients of K of a token; by default, 3/16 of its elements"),
    ):
        made.add_argument(
            f"--{name}-ranks", type=int, nargs="+", default=RANKS[name], help=f"{name}: {text}"
        )
    made.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    made.add_argument("--layers", type=int, default=4, help="layers that are measured together")
    for name, text in (
        ("tile", "tokens of a compressed tile"),
        ("full-precision-tile", "full-precision tokens per iteration"),
        ("warps", "warps per program"),
        ("stages", "stages of the software pipeline"),
        ("programs", "programs per multiprocessor"),
        ("registers", "maximum registers of a thread"),
        ("splits", "programs that share a KV head, without balancing; 0 to fill the GPU"),
    ):
        made.add_argument(f"--{name}", type=int, help=f"{text}; by default, the format's own")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--runs", type=int, default=30, help="timed runs of each graph")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def options_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the fields of `KernelSource` that the arguments set."""
    fields = (
        "tile", "full_precision_tile", "warps", "stages", "programs", "registers", "splits",
    )  # fmt: skip
    return {name: getattr(args, name) for name in fields if getattr(args, name) is not None}


def main() -> None:
    args = parser().parse_args()
    with torch.inference_mode():
        rows = figures(
            args.shape, args.cases, args.formats,
            {name: getattr(args, f"{name}_ranks") for name in RANKS}, options_of(args),
            layers=args.layers, device=args.device, runs=args.runs, ragged=args.ragged,
        )  # fmt: skip
        show(describe(args.device), rows, args.json)
