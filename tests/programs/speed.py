"""Speed of the complete service on one core compared with transformers, and of the gateway.

``python -m tests.programs.speed`` measures transformers and the service one after the other, with
the same fp32 weights and one thread for each worker. It prints four measurements with their goals.
``--json FILE`` saves them.
"""

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from grpc import aio
from rich.console import Console
from rich.table import Table

from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from runtime.offline.compress import documentation
from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer
from tests.harness.deployment import Running, deployed

if TYPE_CHECKING:  # defined in the type stubs only
    from headrace.v1.inference_pb2_grpc import InferenceAsyncStub

PREFILL_TOKENS, DECODE_PROMPT, DECODE_TOKENS, STREAMS, REPEATS = 512, 128, 48, 8, 7
STREAMS_TOKENS = 192  # enough that the first stream still runs when the last one starts
GATEWAY_GOAL = 5000.0  # tokens/s on one core


@dataclass(frozen=True)
class Figure:
    """A measurement, the value that it is compared with, and the goal for their ratio."""

    name: str
    ours: float
    unit: str
    against: float
    against_name: str
    goal: float

    @property
    def ratio(self) -> float:
        return self.ours / self.against


def measure_peer() -> dict[str, float]:
    """Measure transformers in a separate process."""
    command = [sys.executable, "-m", "tests.programs.speed_peer"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(output.stdout.splitlines()[-1])
    return figures


def measure_gateway() -> float:
    """Return the tokens/s that the gateway streams from a synthetic worker."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "gateway.json"
        command = [sys.executable, "-m", "services.gateway.bench", "--json", str(report)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        runs = json.loads(report.read_text())["runs"]
    return max(float(run["tokens_per_s"]) for run in runs)


async def measure_service(running: Running) -> dict[str, float]:
    """Measure prefill, one stream and eight streams through the complete service."""
    text = load_tokenizer(resolve_model("smollm2-135m")).encode(documentation()[1])
    async with aio.insecure_channel(running.grpc_target) as channel:
        stub = InferenceStub(channel)
        await _stream(stub, text[:DECODE_PROMPT], 4)  # the first request opens the sessions
        prefill, single, eight = [], [], []
        for repeat in range(REPEATS):
            prompt = text[repeat * 1000 :]
            started = time.perf_counter()
            times = await _stream(stub, prompt[:PREFILL_TOKENS], 1)
            prefill.append(times[0] - started)
            times = await _stream(stub, prompt[:DECODE_PROMPT], DECODE_TOKENS)
            single.append((len(times) - 1) / (times[-1] - times[0]))
            streams = (
                # No start is that of a later prefill, whose first tokens would be cached.
                _stream(stub, prompt[100 + at * 200 :][:DECODE_PROMPT], STREAMS_TOKENS)
                for at in range(STREAMS)
            )
            eight.append(_rate_while_all_run(await asyncio.gather(*streams)))
    return {
        "prefill_s": statistics.median(prefill),
        "one_stream": statistics.median(single),
        "eight_streams": statistics.median(eight),
    }


def _rate_while_all_run(streams: list[list[float]]) -> float:
    """Return the tokens/s of all streams during the time in which all of them run."""
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    tokens = sum(start < at <= end for times in streams for at in times)
    return tokens / (end - start)


async def _stream(stub: "InferenceAsyncStub", prompt: list[int], max_tokens: int) -> list[float]:
    """Send one request and return the arrival time of each token."""
    request = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=prompt),
        max_tokens=max_tokens,
        temperature=0,
        logit_bias={
            0: -100.0,
            2: -100.0,
        },  # bias against end tokens, so that all streams have the same length
    )
    times: list[float] = []
    async for response in stub.Generate(request):
        times += [time.perf_counter()] * len(response.tokens)
    return times


def measure() -> list[Figure]:
    peer = measure_peer()
    with deployed() as running:
        ours = asyncio.run(measure_service(running))
    gateway = measure_gateway()
    single, eight = ours["one_stream"], ours["eight_streams"]
    hf_prefill = PREFILL_TOKENS / peer["prefill_s"]
    return [
        Figure(
            f"prefill of {PREFILL_TOKENS} tokens, to the first token at the client",
            *(PREFILL_TOKENS / ours["prefill_s"], "tokens/s", hf_prefill, "transformers", 1.0),
        ),
        Figure(
            "decode of one stream, through the whole service",
            *(single, "tokens/s", peer["decode_tokens_per_s"], "transformers", 1.2),
        ),
        Figure(f"decode of {STREAMS} streams", eight, "tokens/s", single, "one stream", 3.0),
        Figure("gateway alone, 64 clients", gateway, "tokens/s", GATEWAY_GOAL, "goal", 1.0),
    ]


def main() -> int:
    figures = measure()
    table = Table("figure", "ours", "against", "ratio", "goal")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.ours:,.1f} {figure.unit}",
            f"{figure.against:,.1f} ({figure.against_name})",
            f"{figure.ratio:.2f}",
            f"≥ {figure.goal:g}",
        )
    Console(width=120).print(table)
    if "--json" in sys.argv:
        record = {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "versions": {name: version(name) for name in ("torch", "transformers", "headrace")},
            "figures": [vars(figure) | {"ratio": figure.ratio} for figure in figures],
        }
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(record, indent=1))
    return 0 if all(figure.ratio >= figure.goal for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
