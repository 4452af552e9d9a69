"""Benchmark of the engine on the CPU, compared with transformers and the physical floor.

``python -m runtime.offline.bench engine [--model NAME|PATH] [--json PATH]`` measures a prefill of
512 tokens and a decode step of one and of eight sequences (streams). Each time is the shortest of
several runs. Runs of the engine and of the peer (transformers) alternate. The peer's time covers
its forward pass and an argmax, without ``generate``; ours covers the engine's whole step.

The floor of a decode step is the time to read the fp32 weights once, at the memory bandwidth
measured with a sum over a large array. The engine can be faster than that floor, because it stores
weights as codes, which are smaller. The floor of a prefill is the time of its floating-point
operations at the measured rate of one large matmul.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint import Checkpoint, Dense, checkpoint_path, load_checkpoint
from runtime.checkpoint.weights import linears_of
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SamplingParams
from runtime.engine import Add, Engine, LocalExecutor
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.bench import peers
from runtime.pages.plan import PageCount

PROMPT_TOKENS = 512
CONTEXT_TOKENS = 128
STREAMS = 8


@dataclass(frozen=True)
class Figure:
    """One row of the table: durations of a prefill or a decode step, in milliseconds."""

    name: str
    ours_ms: float
    floor_ms: float
    peer_ms: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench engine")
    parser.add_argument("--model", default="smollm2-135m", help="name or path of a checkpoint")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    checkpoint = load_checkpoint(checkpoint_path(arguments.model))
    figures = list(measure(checkpoint))
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} threads, fp32, keep {checkpoint.keep}")
    print(f"{'':22}{'ours':>10}{'floor':>10}{'of floor':>10}{'peer':>10}{'speedup':>9}")
    for figure in figures:
        line = f"{figure.name:22}{figure.ours_ms:8.1f}ms{figure.floor_ms:8.1f}ms"
        line += f"{figure.floor_ms / figure.ours_ms:10.0%}"
        if figure.peer_ms is not None:
            line += f"{figure.peer_ms:8.1f}ms{figure.peer_ms / figure.ours_ms:8.2f}x"
        print(line)
    one, many = figures[1].ours_ms, figures[2].ours_ms
    print(f"{STREAMS} streams reach {STREAMS * one / many:.2f}x the tokens/s of one")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2))


@torch.inference_mode()
def measure(checkpoint: Checkpoint) -> Iterator[Figure]:
    """Measure prefill, decode of one stream, and decode of eight streams."""
    generator = torch.Generator().manual_seed(0)
    vocab = checkpoint.config.vocab_size
    prompt = torch.randint(vocab, (PROMPT_TOKENS,), generator=generator).tolist()
    model = build_model(checkpoint)
    peer = peer_of(checkpoint)
    weights = sum(_parameters(checkpoint)) * 4
    read_ms = weights / _bandwidth() * 1e3
    matmul_ms = 2 * sum(_parameters(checkpoint)[:-1]) * PROMPT_TOKENS / _matmul_rate() * 1e3

    ours, theirs = _alternate(
        partial(_prefill_ms, model, prompt), peer and partial(_peer_prefill_ms, peer, prompt), 5
    )
    yield Figure(f"prefill {PROMPT_TOKENS}", ours, matmul_ms, theirs)
    context = prompt[:CONTEXT_TOKENS]
    for streams in (1, STREAMS):
        ours, theirs = _alternate(
            partial(_decode_ms, model, context, streams),
            peer and partial(_peer_decode_ms, peer, context, streams),
            3,
        )
        yield Figure(f"decode step, batch {streams}", ours, read_ms, theirs)


def _alternate(
    ours: Callable[[], float], theirs: Callable[[], float] | None, repeats: int
) -> tuple[float, float | None]:
    """Return the shortest of ``repeats`` times of each callable, called alternately."""
    mine, peers = [], []
    for _ in range(repeats):
        mine.append(ours())
        if theirs is not None:
            peers.append(theirs())
    return min(mine), min(peers, default=None)


def _prefill_ms(model: Model, prompt: list[int]) -> float:
    engine = Engine(LocalExecutor(model, EngineOptions(PageCount(64), Limits(1, 1))))
    start = time.perf_counter()
    engine.step([Add(Request("r", tuple(prompt), len(prompt), SamplingParams(), max_tokens=1))])
    while engine.has_work:
        engine.step([])
    return (time.perf_counter() - start) * 1e3


def _decode_ms(model: Model, prompt: list[int], streams: int) -> float:
    """Return the shortest of 24 decode steps with ``streams`` sequences, in milliseconds."""
    limits = Limits(max_running=streams, max_waiting=streams)
    engine = Engine(LocalExecutor(model, EngineOptions(PageCount(32 * streams), limits)))
    requests = [
        Request(str(n), (*prompt, n), len(prompt) + 1, SamplingParams(), max_tokens=200)
        for n in range(streams)
    ]
    engine.step([Add(request) for request in requests])
    while len(engine.step([]).tokens) < streams:
        pass
    return min(_timed_ms(lambda: engine.step([])) for _ in range(24))


def _timed_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def peer_of(checkpoint: Checkpoint) -> Any:
    """Return a transformers model with the same weights, or None if it is not available."""
    try:
        return peers.build(checkpoint)
    except (ImportError, ValueError) as error:
        print(f"no peer: {error}")
        return None


def _peer_prefill_ms(peer: Any, prompt: list[int]) -> float:
    tokens = torch.tensor([prompt])
    return _timed_ms(lambda: peer(tokens, use_cache=True, logits_to_keep=1).logits.argmax())


def _peer_decode_ms(peer: Any, prompt: list[int], streams: int) -> float:
    tokens = torch.tensor([prompt] * streams)
    forward = peers.cached(peer)
    forward(tokens)
    token = tokens[:, -1:]

    def step() -> None:
        forward(token).argmax(-1)

    return min(_timed_ms(step) for _ in range(12))


def _parameters(checkpoint: Checkpoint) -> list[int]:
    """Return the parameter count of every linear layer, the language model head last."""
    counts = [
        linear.weight.numel() if isinstance(linear, Dense) else linear.u.numel() + linear.v.numel()
        for layer in checkpoint.layers
        for _, linear in linears_of(layer)
    ]
    return [*counts, checkpoint.lm_head.numel()]


def _bandwidth() -> float:
    """Return the bandwidth of a sum over 512 MiB, in bytes per second."""
    data = torch.ones(1 << 27)
    return data.nbytes / min(_timed_ms(data.sum) for _ in range(5)) * 1e3


def _matmul_rate() -> float:
    """Return the speed of a 512 x 2048 x 2048 matmul, in floating-point operations per second."""
    a, b = torch.randn(512, 2048), torch.randn(2048, 2048)
    return 2 * 512 * 2048 * 2048 / min(_timed_ms(lambda: a @ b) for _ in range(5)) * 1e3


if __name__ == "__main__":
    main()
