"""Host time of a replayed decode step: ``python -m runtime.offline.bench host --help``.

The step's graph is replaced by one launch that writes a constant token. The remaining time is the
engine's work on the host: commands, scheduling, launches, copies and tokens. If it exceeds the time
of a step on the device, the device is idle while the host works.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.engine import Engine, LocalExecutor
from runtime.engine.commands import Arrived, Cancel, Command, Reserve
from runtime.gemm.model import build_gemm_model
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.bench.device import describe
from runtime.offline.bench.shapes import PAGE, SHAPES, random_checkpoint
from runtime.pages.plan import PageCount, pages_for
from runtime.sampling.on_device import SamplingFeatures
from runtime.steps.replay import StepReplay

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 4096


@dataclass(frozen=True)
class Figure:
    """Median host time of a step with ``streams`` streams, in microseconds.

    Attributes:
        step_us: time of a step without commands. On average, one stream in sixteen gets a new page.
        join_us: time of a step in which a new stream joins after its KV has arrived.
    """

    streams: int
    step_us: float
    join_us: float


class HostBench:
    """An engine with all batch slots in use, whose decode step returns a constant token."""

    def __init__(self, model: Model, streams: int) -> None:
        limits = Limits(max_running=streams, max_waiting=streams)
        pages = pages_for(PROMPT_TOKENS + OUTPUT_TOKENS, model.page_size)
        options = EngineOptions(PageCount(streams * pages), limits, replay=True)
        executor = LocalExecutor(model, options)
        self._engine = Engine(executor)
        steps = executor.steps
        assert isinstance(steps, StepReplay)
        sampled = steps._sampler.results[0]

        def run(bucket: int) -> None:  # noqa: ARG001 - replaces a pass
            sampled.fill_(1)

        def sample(bucket: int, features: SamplingFeatures) -> None:
            """Sample nothing."""

        steps._decode.run = run  # type: ignore[method-assign]
        steps._sampler.run = sample  # type: ignore[method-assign]
        self._names = [self._join(number) for number in range(streams)]
        self._engine.step([])

    def step_us(self) -> float:
        return self._timed([])

    def join_us(self) -> float:
        """Time the step in which a new stream replaces the oldest one."""
        number = len(self._names)
        oldest = self._names[number - self._engine.scheduler.num_running]
        self._engine.step([Cancel(oldest)])
        self._engine.step([Reserve(self._request(number))])
        self._names.append(str(number))
        return self._timed([self._arrived(number)])

    def _join(self, number: int) -> str:
        self._engine.step([Reserve(self._request(number))])
        self._engine.step([self._arrived(number)])
        return str(number)

    def _request(self, number: int) -> Request:
        length = PROMPT_TOKENS + number % PAGE  # streams get pages in different steps
        return Request(str(number), (1,) * length, length, SamplingParams(), OUTPUT_TOKENS)

    @staticmethod
    def _arrived(number: int) -> Arrived:
        return Arrived(str(number), (SampledToken(0, 0, 1),))

    def _timed(self, commands: list[Command]) -> float:
        start = time.perf_counter()
        self._engine.step(commands)
        return (time.perf_counter() - start) * 1e6


def figures(device: str, streams: list[int], runs: int) -> Iterator[Figure]:
    checkpoint = random_checkpoint(SHAPES["tiny"], 1.0, device=device)
    model: Model
    if device == "cuda":
        model = build_gemm_model(checkpoint, device=device, page_size=PAGE)
    else:
        model = build_model(checkpoint, device=device, page_size=PAGE)
    for count in streams:
        bench = HostBench(model, count)
        steps = [bench.step_us() for _ in range(runs)]
        joins = [bench.join_us() for _ in range(runs)]
        yield Figure(count, median(steps), median(joins))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench host")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[1, 8, 64], help="numbers of streams"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=300, help="timed steps of each kind")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(describe(args.device))
    print(f"{'streams':>8} {'step, us':>9} {'join, us':>9}")
    rows = []
    with torch.inference_mode():
        for figure in figures(args.device, args.streams, args.runs):
            print(f"{figure.streams:8} {figure.step_us:9.0f} {figure.join_us:9.0f}", flush=True)
            rows.append(asdict(figure))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
