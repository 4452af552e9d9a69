"""What serving costs a decode step: ``python -m tests.e2e.rpc_delay [--device cuda] [--shape …]``.

An engine in a process of its own steps 64 sequences; then a colocated deployment streams 64
sequences of the same lengths over gRPC, through gateway and worker. Both are as fast as their
fastest stretch of `WINDOW` tokens of every stream. With a shape, of `runtime.bench`, the model has
random weights, and SmolLM2's vocabulary.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from grpc import aio
from rich.console import Console

from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from runtime.bench.shapes import SHAPES, random_checkpoint
from runtime.checkpoint import load_checkpoint
from runtime.engine import Add, Engine, Limits
from runtime.kv.pages import pages_for
from runtime.model import Model, step_refusal
from runtime.sequence import Request, Sampling
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer
from services.common.worker import PAGE_SIZE
from services.local.model_folder import write_model
from tests.e2e.deployment import Running, deployed

MODEL = "smollm2-135m"
PROMPT, WINDOW = 64, 64


def random_model(shape: str, keep: float, folder: Path, device: str) -> Path:
    """A model's folder, of random weights, which never end a text."""
    tokenizer = load_tokenizer(resolve_model(MODEL))
    vocab = load_checkpoint(resolve_model(MODEL)).config.vocab_size
    config = replace(SHAPES[shape], vocab_size=vocab)
    checkpoint = random_checkpoint(config, keep, device=device)
    checkpoint.lm_head[list(tokenizer.eos_ids)] = 0
    write_model(checkpoint, tokenizer, folder / shape)
    return folder / shape


def alone_ms(model_path: Path, streams: int, tokens: int, device: str) -> float:
    """Milliseconds of a step without anybody to tell."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    checkpoint = load_checkpoint(model_path, dtype=dtype)
    stepped = step_refusal(checkpoint, device, dtype) is None
    model = Model(checkpoint, device=device, dtype=dtype, page_size=PAGE_SIZE, stepped=stepped)
    engine = Engine(
        model,
        num_pages=streams * pages_for(PROMPT + tokens + 1, PAGE_SIZE),
        limits=Limits(max_running=streams, max_waiting=streams),
        replay=model.replayable,
    )
    engine.warm_up()
    engine.step([Add(_request(number, tokens)) for number in range(streams)])
    times = []
    while engine.has_work:
        if len(engine.step([]).tokens) == streams:
            times.append(time.perf_counter())
    return _fastest(times)


def _request(number: int, tokens: int) -> Request:
    prompt = tuple(number + 7 * at for at in range(PROMPT))
    return Request(str(number), prompt, PROMPT, Sampling(), max_tokens=tokens)


def _fastest(times: list[float]) -> float:
    """Milliseconds between two of them, in the best stretch."""
    if len(times) <= WINDOW:
        raise ValueError(f"{len(times)} tokens while all streams ran: more --tokens are needed")
    pairs = zip(times, times[WINDOW:], strict=False)
    return min(1e3 * (end - start) / WINDOW for start, end in pairs)


async def _stream(running: Running, streams: int, tokens: int) -> list[float]:
    """When each token of one stream came, while all of them ran."""
    times: list[float] = []
    ended: list[float] = []
    async with aio.insecure_channel(running.grpc_target) as channel:
        stub = InferenceStub(channel)

        async def ask(number: int) -> None:
            request = pb.GenerateRequest(
                tokens=pb.TokenIds(ids=_request(number, tokens).tokens),
                max_tokens=tokens,
                temperature=0.0,
            )
            async for response in stub.Generate(request):
                if number == streams - 1:
                    times.extend([time.perf_counter()] * len(response.tokens))
            ended.append(time.perf_counter())

        await asyncio.gather(*(ask(number) for number in range(streams)))
    return [at for at in times if at < ended[0]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.rpc_delay")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of a random model")
    parser.add_argument("--keep", type=float, default=0.5, help="of a random model")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = resolve_model(MODEL)
        if own.shape:
            path = random_model(own.shape, own.keep, Path(folder), own.device)
        alone = alone_ms(path, own.streams, own.tokens, own.device)
        torch.cuda.empty_cache()
        flags = ("--colocated", "--codec", "raw", "--model", str(path), "--device", own.device)
        with deployed(*flags) as running:
            for _ in range(2):  # what the first one warms up
                times = asyncio.run(_stream(running, own.streams, own.tokens))
    served = _fastest(times)
    Console().print(
        f"{own.shape or MODEL}, {own.streams} streams on {own.device}: "
        f"a step {alone:.3f} ms alone, {served:.3f} ms served, {served / alone - 1:+.1%}"
    )


if __name__ == "__main__":
    main()
