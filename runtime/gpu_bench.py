"""How fast a decode step is on a GPU: ``python -m runtime.gpu_bench --help``.

Random weights at real shapes. A step's floor is the time to read its weights and its KV once, at
the speed of a copy, bytes read and written. Peers run in the same process with the same weights:
transformers with a static cache, eager and compiled.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from runtime import peers as transformers_peers
from runtime.checkpoint.weights import Checkpoint, Dense, FactorPair, LayerWeights, Linear
from runtime.config import ModelConfig, RopeConfig
from runtime.decode_step import DecodeStep, Packed
from runtime.rope import cos_sin_table

PAGE = 16
SHAPES = {
    "llama-7b": ModelConfig(
        "LlamaForCausalLM", 32_000, 4096, 11_008, 32, 32, 32, 128, 36_864, 1e-5, False
    ),
    "llama-3-8b": ModelConfig(
        "LlamaForCausalLM", 128_256, 4096, 14_336, 32, 32, 8, 128, 36_864, 1e-5, False,
        RopeConfig(theta=500_000.0),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One measured step, milliseconds."""

    name: str
    ms: float
    floor_ms: float

    def __str__(self) -> str:
        return f"{self.name:64} {self.ms:8.3f} {self.floor_ms:8.3f} {self.floor_ms / self.ms:6.1%}"


def random_checkpoint(
    config: ModelConfig, keep: float, ragged: int = 0, device: str = "cuda"
) -> Checkpoint:
    """bf16; ``keep`` 1 is dense, ``ragged`` varies ranks by so much up and down, layer by layer."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float) -> Tensor:
        made = torch.empty(*shape, dtype=torch.bfloat16, device=device)
        return made.normal_(0, scale, generator=generator)

    def linear(out: int, inner: int, layer: int) -> Linear:
        if keep >= 1:
            return Dense(random(out, inner, scale=inner**-0.5))
        rank = int(out * inner * keep / (out + inner)) + ragged * (layer % 3 - 1)
        return FactorPair(
            random(out, rank, scale=rank**-0.5), random(rank, inner, scale=inner**-0.5)
        )

    hidden, gated = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ones = torch.ones(hidden, dtype=torch.bfloat16, device=device)

    def layer(number: int) -> LayerWeights:
        return LayerWeights(
            input_norm=ones,
            q=linear(heads, hidden, number),
            k=linear(kv_heads, hidden, number),
            v=linear(kv_heads, hidden, number),
            o=linear(hidden, heads, number),
            post_norm=ones,
            gate=linear(gated, hidden, number),
            up=linear(gated, hidden, number),
            down=linear(hidden, gated, number),
        )

    return Checkpoint(
        config,
        random(config.vocab_size, hidden, scale=1.0),
        tuple(layer(number) for number in range(config.num_layers)),
        ones,
        random(config.vocab_size, hidden, scale=hidden**-0.5),
        "",
        keep=keep,
    )


class StepBench:
    """One model on the GPU, and the steps that are measured on it."""

    def __init__(self, shape: str, keep: float, ragged: int = 0) -> None:
        self.name = f"{shape}, keep {keep:g}" + (f", ragged by {ragged}" if ragged else "")
        self.config = SHAPES[shape]
        self.checkpoint = random_checkpoint(self.config, keep, ragged)
        self.packed = Packed.of(self.checkpoint, torch.device("cuda"))
        cos, sin = cos_sin_table(self.config, self.config.context_length)
        self._rope = cos.cuda(), sin.cuda()
        self._planes: list[Tensor] = []

    def step(
        self, batch: int, context: int, programs: int, tile_bytes: int, columns: int, warps: int
    ) -> DecodeStep:
        """Of sequences that have ``context`` tokens, their pages in random order."""
        config = self.config
        each = -(-(context + 1) // PAGE)
        if not self._planes or len(self._planes[0]) < batch * each:
            self._planes = []
            shape = (batch * each, config.num_kv_heads, PAGE, config.head_dim)
            self._planes = [
                torch.randn(shape, dtype=torch.bfloat16, device="cuda")
                for _ in range(2 * config.num_layers)
            ]
        made = DecodeStep(
            config,
            self.packed,
            self.checkpoint.embedding,
            self.checkpoint.lm_head,
            self.checkpoint.final_norm,
            self._planes,
            self._rope,
            batch=batch,
            most_pages=each,
            programs=programs,
            tile_bytes=tile_bytes,
            columns=columns,
            warps=warps,
        )
        ids = torch.randperm(batch * each, device="cuda")
        made.page_table.copy_(ids.view(batch, each))
        made.positions.fill_(context)
        made.lengths.fill_(context + 1)
        return made

    def floor_ms(self, batch: int, context: int, copied: float) -> float:
        """``copied``: bytes per millisecond."""
        config = self.config
        weights = int(self.packed.weights.nbytes + self.checkpoint.lm_head.nbytes)
        kv = 4 * config.num_layers * config.num_kv_heads * config.head_dim * batch * (context + 1)
        return (weights + kv) / copied


def milliseconds(
    call: Callable[[], object], before: Callable[[], None] | None = None, runs: int = 30
) -> float:
    """The median of several runs after a few, ``before`` not counted."""
    found: list[float] = []
    for run in range(runs + 5):
        if before:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        if run >= 5:
            found.append(float(start.elapsed_time(end)))
    return median(found)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """The same as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_rate() -> float:
    """Bytes read and written in a millisecond by a copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def figures(
    shape: str,
    keeps: Sequence[float],
    cases: Sequence[tuple[int, int]],
    tiles: Sequence[tuple[int, int, int, int]],
    *,
    peers: bool,
) -> Iterator[Figure]:
    """Ours in every tile, then the peers; ``cases`` are batch and context."""
    copied = copy_rate()
    yield Figure("a copy, GB/s in the last columns", copied / 1e6, copied / 1e6)
    for keep in keeps:
        bench = StepBench(shape, keep)
        for (batch, context), tile in product(cases, tiles):
            programs, size, columns, warps = tile
            name = f"{bench.name}, batch {batch}, context {context}"
            floor = bench.floor_ms(batch, context, copied)
            try:
                step = bench.step(batch, context, programs, size, columns, warps)
                took = milliseconds(captured(step.launch))
            except RuntimeError as error:  # a tile that does not fit: the others go on
                print(f"{name}, tile {tile}: {error}")
                continue
            yield Figure(f"{name}, tile {tile}", took, floor)
        if not peers:
            continue
        model = transformers_peers.build(bench.checkpoint)
        for batch, context in cases:
            floor = bench.floor_ms(batch, context, copied)
            for compiled in (False, True):
                peer = transformers_peers.decode_step(model, context, batch, compiled=compiled)
                kind = "compiled" if compiled else "eager"
                name = f"{bench.name}, batch {batch}, context {context}, transformers {kind}"
                yield Figure(name, milliseconds(peer.run, peer.reset), floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-7b")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--programs", type=int, nargs="+", default=[132])
    parser.add_argument("--tile-bytes", type=int, nargs="+", default=[1 << 15])
    parser.add_argument("--columns", type=int, nargs="+", default=[2048])
    parser.add_argument("--warps", type=int, nargs="+", default=[8])
    parser.add_argument("--peers", action="store_true", help="transformers as well")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    cases = list(product(arguments.batch, arguments.context))
    tiles = list(
        product(arguments.programs, arguments.tile_bytes, arguments.columns, arguments.warps)
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'milliseconds':64} {'step':>8} {'floor':>8}")
    found = []
    with torch.inference_mode():
        for figure in figures(arguments.shape, arguments.keep, cases, tiles, peers=arguments.peers):
            print(figure, flush=True)
            found.append(asdict(figure))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
