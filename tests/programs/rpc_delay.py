"""Serving overhead of a decode step.

``python -m tests.programs.rpc_delay [--device cuda] [--shape NAME]`` runs two measurements. First,
an engine without a service decodes 64 sequences in one batch. Then a colocated deployment
streams 64 sequences of the same lengths over gRPC, through gateway and worker. Both step times are
averages while all sequences run. The step time under serving comes from the worker's metrics,
because the worker does not wait for clients that read slowly. With a shape of
`runtime.offline.bench`, the model has random weights.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from grpc import aio
from rich.console import Console

from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from runtime.checkpoint import load_checkpoint
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SamplingParams
from runtime.engine import Add, Engine, LocalExecutor
from runtime.gemm.model import build_fastest_model
from runtime.offline.bench.shapes import SHAPES
from runtime.pages.plan import PAGE_SIZE
from services.common.model_source import DEFAULT_MODEL, resolve_model
from tests.harness.deployment import Running, deployed
from tests.harness.random_model import RandomModel

PROMPT = 64
PROCESS = "decode-0"
POLL_S = 0.2


def alone_ms(model_path: Path, streams: int, tokens: int, device: str) -> float:
    """Return the step time of an engine without a service, in milliseconds."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    checkpoint = load_checkpoint(model_path, dtype=dtype)
    model = build_fastest_model(checkpoint, device=device, dtype=dtype, page_size=PAGE_SIZE)
    options = EngineOptions(
        model.layout.plan.computed(PROMPT + tokens + 1).times(streams),
        Limits(max_running=streams, max_waiting=streams),
        replay=model.replayable,
    )
    engine = Engine(LocalExecutor(model, options))
    engine.warm_up()
    engine.step([Add(_request(number, tokens)) for number in range(streams)])
    times = []
    while engine.has_work:
        if len(engine.step([]).tokens) == streams:
            times.append(time.perf_counter())
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def _request(number: int, tokens: int) -> Request:
    prompt = tuple(number + 7 * at for at in range(PROMPT))
    return Request(str(number), prompt, PROMPT, SamplingParams(), max_tokens=tokens)


@dataclass(frozen=True)
class Sample:
    """Values of the worker's metrics.

    Attributes:
        running: sequences that are running.
        steps: engine steps so far.
        busy_s: seconds that the engine has been stepping.
    """

    running: float
    steps: float
    busy_s: float

    @classmethod
    def of(cls, running: Running) -> Self:
        names = ("num_requests_running", "engine_steps_total", "engine_busy_seconds_total")
        return cls(*(running.metric(PROCESS, f"headrace_{name}") for name in names))


def step_ms(samples: Sequence[Sample], streams: int) -> float:
    """Return the mean step time in milliseconds while all streams run."""
    full = [sample for sample in samples if sample.running == streams]
    if len(full) < 2 or full[0].steps == full[-1].steps:
        raise ValueError(f"{streams} streams ran too briefly to measure: increase --tokens")
    return 1e3 * (full[-1].busy_s - full[0].busy_s) / (full[-1].steps - full[0].steps)


async def serve(running: Running, streams: int, tokens: int) -> list[Sample]:
    """Run the streams, and return samples of the worker's metrics taken meanwhile."""
    samples: list[Sample] = []
    streaming = asyncio.create_task(_stream(running, streams, tokens))
    while not streaming.done():
        await asyncio.sleep(POLL_S)
        samples.append(await asyncio.to_thread(Sample.of, running))
    await streaming
    return samples


async def _stream(running: Running, streams: int, tokens: int) -> None:
    async with aio.insecure_channel(running.grpc_target) as channel:
        stub = InferenceStub(channel)

        async def run(number: int) -> int:
            request = pb.GenerateRequest(
                tokens=pb.TokenIds(ids=_request(number, tokens).tokens),
                max_tokens=tokens,
                temperature=0.0,
            )
            return sum([len(response.tokens) async for response in stub.Generate(request)])

        await asyncio.gather(*(run(number) for number in range(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.rpc_delay")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="shape of a model with random weights"
    )
    parser.add_argument(
        "--keep", type=float, default=0.5, help="fraction of parameters kept, with --shape"
    )
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, help="tokenizer of --shape")
    args = parser.parse_args()
    if args.shape:
        path = RandomModel(args.shape, args.keep, args.tokenizer).ensure()
    else:
        path = resolve_model(DEFAULT_MODEL)
    with torch.inference_mode():
        alone = alone_ms(path, args.streams, args.tokens, args.device)
        torch.cuda.empty_cache()
        flags = ("--colocated", "--codec", "raw", "--model", str(path), "--device", args.device)
        with deployed(*flags) as running:
            served = step_ms(asyncio.run(serve(running, args.streams, args.tokens)), args.streams)
    Console().print(
        f"{args.shape or DEFAULT_MODEL}, {args.streams} streams on {args.device}: "
        f"a step {alone:.3f} ms alone, {served:.3f} ms served, {served / alone - 1:+.1%}"
    )


if __name__ == "__main__":
    main()
