"""Decode attention by KV format: ``python -m runtime.bench kv --help``.

Several layers are measured in one CUDA graph, so that their KV exceeds the L2 cache; times are
those of one layer. The floor is the time to read K and V once, at the measured rate of a copy. The
last column is the time of dense attention divided by the format's. Encoding has two rows: all pages
of the prompts that are not recent, and a decode step in which no page leaves the window.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.bench.device import Figure, captured, copy_rate, describe, milliseconds, show
from runtime.bench.shapes import PAGE, SHAPES
from runtime.config import ModelConfig
from runtime.core.window import SINK_PAGES, first_recent
from runtime.kv.compressed import FusedKernels
from runtime.kv.dense import DenseFormat
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.registry import COMPRESSED

FORMATS = tuple(
    name for name in COMPRESSED if isinstance(COMPRESSED[name](SHAPES["tiny"]), QuantizedFormat)
)
"""Formats with fused kernels."""


@dataclass(frozen=True)
class Compared(Figure):
    """A figure and the time of dense attention divided by its time; 0 where this has no meaning."""

    speedup: float = 0.0

    def __str__(self) -> str:
        speedup = f"{self.speedup:8.2f}x" if self.speedup else ""
        return super().__str__() + speedup


class KVBench:
    """Benchmark of one batch of decoding sequences.

    Args:
        batch, context: number of sequences, and their length.
        layers: layers that are measured together.
        rate: bandwidth of a copy, in bytes per millisecond.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        context: int,
        layers: int,
        rate: float,
        device: str,
        runs: int,
    ) -> None:
        self._config, self._batch, self._context = config, batch, context
        self._layers, self._rate, self._runs = layers, rate, runs
        self._device = torch.device(device)
        pages = -(-context // PAGE)
        self._inputs = Batch.static(batch, pages, device)
        self._inputs.page_table.copy_(torch.randperm(batch * pages).view(batch, pages))
        self._inputs.positions.fill_(context - 1)
        self._inputs.lengths.fill_(context)
        self._pages = batch * pages
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
        floor = self._batch * self._context * self._exact_bytes / self._rate
        yield Compared(f"{self._title}, dense", self._dense_ms, floor, 1.0)

    def compressed(self, name: str, options: Mapping[str, int]) -> Iterator[Figure]:
        """Measure a compressed format.

        Args:
            options: fields of `KernelSource` to replace.
        """
        kv_format = COMPRESSED[name](self._config)
        assert isinstance(kv_format, QuantizedFormat)
        kernels = _kernels(kv_format, self._config, options)
        recent = first_recent(self._context, PAGE)
        old = self._inputs.page_table[:, SINK_PAGES:recent].flatten().long()
        layers = [(*exact, *self._stored(kv_format)) for exact in self._exact]
        batch = replace(self._inputs, stored_table=self._inputs.page_table)
        encodes = [
            lambda planes=planes: kernels.encode(planes[0], planes[1], planes[2:], old, old)
            for planes in layers
        ]
        encoded_ms = self._time(encodes)
        attends = [
            lambda planes=planes: kernels.attend(self._q, planes, batch) for planes in layers
        ]
        attended_ms = self._time(attends)
        leaves = [lambda planes=planes: kernels.encode_leaving(planes, batch) for planes in layers]
        leaving_ms = self._time(leaves)
        stored_tokens = len(old) * PAGE
        stored = sum(plane[0, :, 0].nbytes for plane in layers[0][2:])  # bytes of a token
        exact_tokens = self._batch * self._context - stored_tokens
        read = stored_tokens * stored + exact_tokens * self._exact_bytes
        title = f"{self._title}, {name}"
        yield Compared(title, attended_ms, read / self._rate, self._dense_ms / attended_ms)
        moved = stored_tokens * (stored + self._exact_bytes)
        yield Compared(f"{title}, encode prompts", encoded_ms, moved / self._rate)
        yield Compared(f"{title}, no page leaves", leaving_ms, 0.0)

    @property
    def _title(self) -> str:
        return f"batch {self._batch}, context {self._context}"

    @property
    def _exact_bytes(self) -> int:
        return 4 * self._config.num_kv_heads * self._config.head_dim  # of a token

    def _stored(self, kv_format: QuantizedFormat) -> list[Tensor]:
        return [
            torch.empty(self._pages, *plane.shape, dtype=plane.dtype, device=self._device)
            for plane in kv_format.planes(0, PAGE)
        ]

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_()

    def _time(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the time of one call in milliseconds."""

        def run() -> None:
            for call in calls:
                call()

        graph = captured(run, device=self._device.type)
        return milliseconds(graph, device=self._device.type, runs=self._runs) / len(calls)


def _kernels(
    kv_format: QuantizedFormat, config: ModelConfig, options: Mapping[str, int]
) -> FusedKernels:
    from runtime.kv.gpu import StoredPageKernels  # optional: Triton

    return StoredPageKernels(config, replace(kv_format.kernel_source(), **options))


def figures(
    shape: str,
    cases: Sequence[tuple[int, int]],
    formats: Sequence[str],
    options: Mapping[str, int],
    *,
    layers: int,
    device: str,
    runs: int,
) -> Iterator[Figure]:
    """Measure dense attention, then each format, in each case.

    Args:
        cases: pairs of batch size and context length.
        options: fields of `KernelSource` to replace.
    """
    rate = copy_rate(device)
    yield Figure("copy rate, GB/s", rate / 1e6, rate / 1e6)
    for batch, context in cases:
        bench = KVBench(SHAPES[shape], batch, context, layers, rate, device, runs)
        yield from bench.dense()
        for name in formats:
            yield from bench.compressed(name, options)


def case(text: str) -> tuple[int, int]:
    """Parse ``BxC``: the number of sequences and their length.

    Raises:
        ValueError: the text has another form.
    """
    batch, context = map(int, text.split("x"))
    return batch, context


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    made = argparse.ArgumentParser(prog="python -m runtime.bench kv")
    made.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b", help="model shape")
    made.add_argument(
        "--cases", type=case, nargs="+", default=[(16, 8192), (4, 32_768)], metavar="BxC",
        help="numbers of sequences and their lengths in tokens",
    )  # fmt: skip
    made.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    made.add_argument("--layers", type=int, default=4, help="layers that are measured together")
    for name, text in (
        ("tile", "tokens of a stored tile"),
        ("exact-tile", "tokens of an exact tile"),
        ("warps", "warps per program"),
        ("stages", "stages of the software pipeline"),
        ("programs", "programs per multiprocessor"),
    ):
        made.add_argument(f"--{name}", type=int, help=f"{text}; by default, the format's own")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--runs", type=int, default=30, help="timed runs of each graph")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    return made


def options_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the fields of `KernelSource` that the arguments set."""
    fields = "tile", "exact_tile", "warps", "stages", "programs"
    return {name: getattr(args, name) for name in fields if getattr(args, name) is not None}


def main() -> None:
    args = parser().parse_args()
    with torch.inference_mode():
        rows = figures(
            args.shape, args.cases, args.formats, options_of(args), layers=args.layers,
            device=args.device, runs=args.runs,
        )  # fmt: skip
        show(describe(args.device), rows, args.json)
