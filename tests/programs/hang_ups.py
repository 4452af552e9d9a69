"""Clients that hang up: ``python -m tests.programs.hang_ups --seconds 600``.

A third of the requests end early: HTTP connections that close at a random point, also before the
request is complete, gRPC calls that are cancelled, and gRPC deadlines of 1 to 50 ms. The other
requests must be answered, equal prompts equally, and none may wait for a placement to expire.
Afterwards the queues must be empty within two seconds, the next request must take its usual time,
and nothing may leak or be left unhandled.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import grpc
import httpx
from grpc import aio
from rich.console import Console

from headrace.v1.inference_pb2 import GenerateRequest
from headrace.v1.inference_pb2_grpc import InferenceStub
from tests.harness.deployment import Running, deployed, unhandled_errors
from tests.harness.random_model import RandomModel
from tests.programs.soak.leaks import Resources

HUNG_UP = 1 / 3
"""Share of the requests whose client hangs up."""
EMPTY_S = 2.0
"""Time after which no worker may have queued tokens."""
SLOWEST_S = 15.0
"""Bound on every answer: half of the time after which an unused placement expires."""
SLOWER, MARGIN_S = 2.0, 0.5
"""Bound on the first request afterwards, relative to earlier ones, and for noise."""
LIMIT_S = 120.0
say = partial(Console().print, highlight=False, markup=False, soft_wrap=True)
PROMPTS = tuple(
    {"prompt": " ".join(["water"] * words), "max_tokens": tokens, "temperature": 0}
    for words in (3, 40, 300, 1200)
    for tokens in (1, 8, 40)
)
PROBE = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}


@dataclass
class Clients:
    """Concurrent clients of one deployment.

    Attributes:
        ended: number of requests by how they ended.
        slowest_s: longest time until an answer was complete, seconds.
        wrong: answers that differ from an earlier one to the same prompt, and failures.
    """

    running: Running
    rng: random.Random
    ended: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    _answers: dict[str, str] = field(default_factory=dict)

    async def run(self, seconds: float, concurrency: int) -> None:
        """Send requests for a time, and wait for the last ones."""
        until = time.monotonic() + seconds
        async with (
            httpx.AsyncClient(base_url=self.running.url, timeout=LIMIT_S, trust_env=False) as http,
            aio.insecure_channel(self.running.grpc_target) as channel,
        ):
            stub = InferenceStub(channel)
            await asyncio.gather(*(self._client(http, stub, until) for _ in range(concurrency)))

    async def _client(self, http: httpx.AsyncClient, stub: Any, until: float) -> None:
        while time.monotonic() < until:
            body = self.rng.choice(PROMPTS)
            if self.rng.random() >= HUNG_UP:
                await self._complete(http, body)
            elif self.rng.random() < 1 / 2:
                await self._close_connection(body)
            elif self.rng.random() < 1 / 2:
                await self._pass_deadline(stub, body)
            else:
                await self._cancel(stub, body)

    async def _complete(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        began = time.monotonic()
        answer = await http.post("/v1/completions", json=body)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.ended[f"status {answer.status_code}"] += 1
        if answer.status_code != httpx.codes.OK:
            self.wrong.append(answer.text)
            return
        text = answer.json()["choices"][0]["text"]
        if self._answers.setdefault(json.dumps(body), text) != text:
            self.wrong.append(f"{body['prompt'][:20]!r}: {text!r}")

    async def _close_connection(self, body: dict[str, Any]) -> None:
        """Close a connection while the request is sent, right after, or at a random time later."""
        content = json.dumps(body | {"stream": self.rng.random() < 1 / 2}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(content)
        )
        request = head + content
        if part := self.rng.random() < 1 / 8:
            request = request[: self.rng.randrange(1, len(request))]
        _, writer = await asyncio.open_connection("127.0.0.1", self.running.port)
        writer.write(request)
        with contextlib.suppress(OSError):
            await writer.drain()
        await asyncio.sleep(self.rng.choice((0, 0, 0.05, 0.5, 3)) * self.rng.random())
        writer.close() if self.rng.random() < 1 / 2 else writer.transport.abort()
        self.ended["incomplete request" if part else "closed connection"] += 1

    async def _pass_deadline(self, stub: Any, body: dict[str, Any]) -> None:
        try:
            async for _ in stub.Generate(_message(body), timeout=self.rng.uniform(0.001, 0.05)):
                pass
        except aio.AioRpcError as error:
            self.ended[f"gRPC deadline: {error.code().name}"] += 1
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self.wrong.append(str(error.details()))
        else:
            self.ended["answered before the gRPC deadline"] += 1

    async def _cancel(self, stub: Any, body: dict[str, Any]) -> None:
        call = stub.Generate(_message(body))
        reading = asyncio.create_task(_read(call))
        await asyncio.sleep(self.rng.choice((0, 0.05, 3)) * self.rng.random())
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        self.ended["cancelled gRPC call"] += 1


async def _read(call: Any) -> None:
    async for _ in call:
        pass


def _message(body: dict[str, Any]) -> GenerateRequest:
    return GenerateRequest(text=body["prompt"], max_tokens=body["max_tokens"], temperature=0)


def request_s(running: Running) -> float:
    """Return the time of a short request, in seconds."""
    began = time.monotonic()
    url = f"{running.url}/v1/completions"
    httpx.post(url, json=PROBE, timeout=LIMIT_S, trust_env=False).raise_for_status()
    return time.monotonic() - began


def empty_s(running: Running, limit_s: float = 60.0) -> float:
    """Return the time until the router counts no queued tokens, at most ``limit_s`` seconds."""
    began = time.monotonic()
    while time.monotonic() < began + limit_s:
        workers = running.workers().values()
        if not any(worker["queue_tokens"] or worker["promised_tokens"] for worker in workers):
            break
        time.sleep(0.02)
    return time.monotonic() - began


def faults_of(running: Running, seconds: float, seed: int, concurrency: int) -> list[str]:
    """Let clients hang up for a time; return what is wrong during that time and afterwards."""
    running.wait_for_all_workers()
    usual_s = median(request_s(running) for _ in range(5))
    running.wait_until_idle()  # a prefill worker frees pages after the answer
    before = Resources.of(running)
    clients = Clients(running, random.Random(seed))
    asyncio.run(clients.run(seconds, concurrency))
    took_s = empty_s(running)
    next_s = request_s(running)
    leaked = Resources.leaked(running, before, 30.0)
    for name, count in sorted(clients.ended.items()):
        say(f"{count:6} {name}")
    say(
        f"slowest answer {clients.slowest_s:.2f} s, queues empty after {took_s:.2f} s, "
        f"next request {next_s:.2f} s, usual {usual_s:.2f} s"
    )
    found = [f"{name} leaked: {count:g}" for name, count in leaked.items()] + clients.wrong[:20]
    if clients.slowest_s > SLOWEST_S:
        found.append(f"an answer took {clients.slowest_s:.1f} s")
    if took_s > EMPTY_S:
        found.append(f"tokens were queued for {took_s:.1f} s after the last request")
    if next_s > SLOWER * usual_s + MARGIN_S:
        found.append(f"the next request took {next_s:.2f} s instead of {usual_s:.2f} s")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.hang_ups")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--model", help="default: a small one of random weights")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each worker")
    own = parser.parse_args()
    say(f"seed {own.seed}")
    model = ("--model", own.model or str(RandomModel("tiny").ensure()))
    workers = ("--prefill", "1", "--decode", "1", "--tp", str(own.tp))
    with deployed(*workers, *model) as running:
        found = faults_of(running, own.seconds, own.seed, own.concurrency)
    found += unhandled_errors(running.logs)
    say("\n".join(found) or "nothing is wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
