"""Fuzzed schemas beside other streams: no answer is a 5xx, and the streams keep their pace.

``python -m tests.programs.schema_fuzzing`` starts a deployment with a small random model. Rounds
alternate: ``--quiet`` seconds in which only ``--streams`` streams run, a share of ``--messages``
requests without constraints beside the same number of streams, and as many requests with fuzzed
constraints (`tests.programs.fuzzing.schemas`). The streams run in a process of their own. The
program prints the distribution of the gaps between events of the streams in all three, and fails on
a 5xx, on a request without an answer, and if a stream ends with an error.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from random import Random
from typing import Annotated

import httpx
import numpy as np
import typer
from rich.console import Console

from tests.harness.deployment import Running, deployed
from tests.harness.random_model import RandomModel
from tests.programs.fuzzing.schemas import fuzzed_pattern, fuzzed_schema

console = Console(soft_wrap=True, highlight=False)

CLIENTS = 6
"""Number of requests at the same time."""
PATTERNS = 0.1
"""Share of the requests that have a regular expression instead of a schema."""
ROUNDS = 10
STREAM_TOKENS = 4000
TIMEOUT_S = 120.0


@dataclass
class Outcome:
    """Results of all rounds.

    Attributes:
        statuses: number of answers to fuzzed requests by status; 0 without an answer.
        wrong: fuzzed requests that have a wrong answer.
        quiet, plain, fuzzed: gaps of streams in seconds: alone, beside requests without
            constraints, and beside fuzzed requests.
        slowest: seconds of the slowest answer to a fuzzed request.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    fuzzed: list[float] = field(default_factory=list)
    slowest: float = 0.0


def stream_gaps(url: str, model: str, streams: int, begin: float, end: float) -> list[float]:
    """Return the gaps between events of streams that run from now on, in seconds.

    Only gaps that end between the times ``begin`` and ``end`` of `time.time` count.

    Raises:
        httpx.HTTPError, AssertionError: a stream fails.
    """

    async def stream(client: httpx.AsyncClient, number: int) -> list[float]:
        found = list[float]()
        while time.time() < end:
            body = {
                "model": model,
                "prompt": f"Stream {number}",
                "max_tokens": STREAM_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            times = list[float]()
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == httpx.codes.OK, await answer.aread()
                async for line in answer.aiter_lines():
                    assert not line.startswith('data: {"error"'), line
                    if line.startswith("data: "):
                        times.append(time.time())
                    if time.time() >= end:
                        break
            found += [b - a for a, b in pairwise(times) if begin <= b < end]
        return found

    async def run() -> list[list[float]]:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=TIMEOUT_S) as client:
            return await asyncio.gather(*(stream(client, each) for each in range(streams)))

    return [gap for gaps in asyncio.run(run()) for gap in gaps]


def _body(model: str) -> bytes:
    return json.dumps({"model": model, "prompt": "x", "max_tokens": 3}).encode()


def fuzzed_body(random: Random, model: str) -> bytes:
    """Return a request with a fuzzed constraint; it may be no JSON."""
    head = json.loads(_body(model))
    if random.random() < PATTERNS:
        return json.dumps({**head, "guided_regex": fuzzed_pattern(random)}).encode()
    schema = fuzzed_schema(random)
    match random.randrange(3):
        case 0:
            return (
                json.dumps({**head, "guided_json": "SCHEMA"})
                .encode()
                .replace(b'"SCHEMA"', json.dumps(schema.decode(errors="replace")).encode())
            )
        case 1:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": "SCHEMA"}}
            body = json.dumps({**head, "response_format": form})
        case _:
            body = json.dumps({**head, "structured_outputs": {"json": "SCHEMA"}})
    return body.encode().replace(b'"SCHEMA"', schema)


async def send(running: Running, bodies: Sequence[bytes], outcome: Outcome) -> None:
    """Send requests, `CLIENTS` at a time."""
    left = [*bodies]

    async def client() -> None:
        async with httpx.AsyncClient(
            base_url=running.url, trust_env=False, timeout=TIMEOUT_S
        ) as http:
            while left:
                body = left.pop()
                begin = time.monotonic()
                try:
                    answer = await http.post(
                        "/v1/completions",
                        content=body,
                        headers={"content-type": "application/json"},
                    )
                except httpx.HTTPError as error:
                    outcome.statuses[0] += 1
                    outcome.wrong.append(f"{error!r}: {body[:1000]!r}")
                    continue
                outcome.slowest = max(outcome.slowest, time.monotonic() - begin)
                outcome.statuses[answer.status_code] += 1
                if answer.is_server_error:
                    outcome.wrong.append(f"{answer.status_code} {answer.text}: {body[:1000]!r}")

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def play(running: Running, messages: int, streams: int, quiet_s: float, seed: int) -> Outcome:
    """Play all rounds."""
    random, outcome = Random(seed), Outcome()
    settle_s = 2.0
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        for number in range(ROUNDS):
            begin = time.time() + settle_s
            task = process.submit(
                stream_gaps, running.url, running.model, streams, begin, begin + quiet_s
            )
            outcome.quiet += task.result()
            count = messages // ROUNDS
            plain = [_body(running.model)] * count
            fuzzed = [fuzzed_body(random, running.model) for _ in range(count)]
            outcome.plain += asyncio.run(
                _gaps_beside(running, plain, streams, process, control := Outcome())
            )
            assert control.statuses.keys() == {httpx.codes.OK}, control.statuses
            outcome.fuzzed += asyncio.run(_gaps_beside(running, fuzzed, streams, process, outcome))
            console.print(f"round {number}: {dict(outcome.statuses)}, {len(outcome.wrong)} wrong")
    return outcome


async def _gaps_beside(
    running: Running,
    bodies: list[bytes],
    streams: int,
    process: ProcessPoolExecutor,
    outcome: Outcome,
) -> list[float]:
    """Send requests while streams run, in parts of a few seconds each; return their gaps."""
    loop = asyncio.get_running_loop()
    sending = asyncio.create_task(send(running, bodies, outcome))
    gaps = list[float]()
    while not sending.done():
        begin = time.time() + 1.0
        gaps += await loop.run_in_executor(
            process, stream_gaps, running.url, running.model, streams, begin, begin + 4.0
        )
    await sending
    return gaps


def described(gaps: Sequence[float]) -> str:
    """Return count and quantiles of gaps as text."""
    p50, p99, most = np.quantile(gaps, (0.5, 0.99, 1.0)) * 1e3
    return f"{len(gaps)} gaps, p50 {p50:.1f}, p99 {p99:.1f}, maximum {most:.0f} ms"


def main(
    messages: Annotated[int, typer.Option(help="number of fuzzed requests")] = 10_000,
    streams: Annotated[int, typer.Option(help="number of other streams")] = 4,
    quiet: Annotated[float, typer.Option(help="seconds without fuzzed requests per round")] = 8.0,
    shape: Annotated[str, typer.Option(help="shape of the random model")] = "tiny",
    seed: int = 0,
) -> None:
    """Print the results; exit with 1 if there was a wrong answer."""
    model = RandomModel(shape).ensure()
    with deployed("--model", str(model), "--prefill", "1", "--decode", "1") as running:
        running.wait_for_all_workers()
        begin = time.monotonic()
        outcome = play(running, messages, streams, quiet, seed)
        seconds = time.monotonic() - begin
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(outcome.statuses.items()))
    console.print(f"{outcome.statuses.total()} requests in {seconds:.0f} s; by status {statuses}")
    console.print(f"slowest answer {outcome.slowest:.1f} s")
    console.print(f"streams alone: {described(outcome.quiet)}")
    console.print(f"beside requests without constraints: {described(outcome.plain)}")
    console.print(f"beside fuzzed requests: {described(outcome.fuzzed)}")
    for line in outcome.wrong[:20]:
        console.print(line, markup=False)
    raise typer.Exit(bool(outcome.wrong))


if __name__ == "__main__":
    typer.run(main)
