"""Chats in a deployment with a prefix cache whose workers are killed: all tokens equal cold ones.

``python -m tests.programs.chat_faults`` makes the chats of `tests.programs.shared_prefixes`, and
for each turn a *fork*, which continues the same history with other tokens. A deployment of one
prefill and one decode worker without a prefix cache answers them. Then a deployment with a
prefix cache answers them turn by turn: the first turns of all chats in random order, then the
second ones. At the same time, other clients hang up. With ``--kv-tokens``, there are few pages, so
that cached ones are evicted; with longer answers (``--answer-tokens``), sequences are preempted as
well. With ``--kills``, a worker of each role is killed in each turn while it has requests; several
workers of a role are killed in rotation.

A difference is judged as in `tests.programs.equality`.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc import aio
from rich.console import Console

from headrace.v1.inference_pb2_grpc import InferenceStub
from runtime.offline.compress import documentation
from services.common.model_source import DEFAULT_MODEL, resolve_model
from services.tokenizer.loading import load_tokenizer
from tests.harness.deployment import Running, deployed
from tests.harness.points import Points
from tests.harness.random_model import RandomModel
from tests.programs.equality import EPSILON, Answer
from tests.programs.shared_prefixes import (
    ANSWER,
    TURNS,
    Chats,
    Result,
    Turn,
    ask,
    history_after,
    request_of,
)

if TYPE_CHECKING:  # defined in the type stubs only
    from headrace.v1.inference_pb2_grpc import InferenceAsyncStub

console = Console(highlight=False)
COMPUTED_HERE = "headrace_worker_prompts_computed_here_total"
HANG_UP = 0.25
"""Share of the requests beside which another one, with the same prompt, is cancelled."""
KILLED = {
    "HEADRACE_GATEWAY_MAX_LOST_WORKERS": "8",
    "HEADRACE_PREFILL_LEASE_S": "8",
    "HEADRACE_DECODE_READ_TIMEOUT_S": "8",
    "HEADRACE_ROUTER_PLACEMENT_TTL_S": "5",
}
REPEATS = 3
"""Maximum number of times that a client sends a request with several choices, which fail when their
worker is lost."""


@dataclass
class Tally:
    """Answers of the deployment with a cache.

    Attributes:
        equal: number of equal answers.
        close, different: descriptions of others.
        cached, prompt: cached tokens and all tokens of the prompts.
        repeated: number of requests with several choices that failed and were sent again.
        cancelled: number of requests that were cancelled.
    """

    equal: int = 0
    close: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    repeated: int = 0
    cancelled: int = 0

    @property
    def summary(self) -> str:
        """All numbers."""
        return (
            f"{self.equal} equal, {len(self.close)} close, {len(self.different)} different; "
            f"{self.cached:,} of {self.prompt:,} prompt tokens cached; "
            f"{self.cancelled} requests cancelled, {self.repeated} sent again"
        )

    def add(self, turn: Turn, expected: Answer, found: Answer) -> None:
        """Compare the choices of an answer with those of the cold deployment, one by one."""
        if found.tokens == expected.tokens:
            self.equal += 1
            return
        if len(found.tokens) != len(expected.tokens):
            self.different.append(f"{turn.case.name}: {len(found.tokens)} tokens")
            return
        length = turn.case.max_tokens
        for start in range(0, len(expected.tokens), length):
            pairs = zip(
                expected.tokens[start:], found.tokens[start:], expected.gaps[start:], strict=False
            )
            differing = [(at, gap) for at, (a, b, gap) in enumerate(pairs) if a != b]
            if differing and differing[0][0] < length:
                at, gap = differing[0]
                kind = self.close if gap < EPSILON else self.different
                kind.append(
                    f"{turn.case.name}, choice {start // length}: token {at}, gap {gap:.4f}"
                )


def fork_of(turn: Turn) -> Turn:
    """Return a turn whose prompt differs from that of another one in the last tokens."""
    prompt = turn.case.prompt
    rng = random.Random(turn.case.seed)
    own = tuple(rng.sample(prompt, min(len(prompt), rng.randint(1, 30))))
    name, salt = f"{turn.case.name}, fork", turn.salt
    case = replace(turn.case, name=name, prompt=(*prompt[: -min(2, len(prompt) - 1)], *own))
    return Turn(case, turn.choices, salt)


async def play_cold(running: Running, chats: Chats, concurrency: int) -> Result:
    """Answer all turns and forks; chats grow with the answers to their turns."""
    result, limit = Result(), asyncio.Semaphore(concurrency)
    async with aio.insecure_channel(running.grpc_target) as channel:
        stub = InferenceStub(channel)

        async def chat_of(chat: int) -> None:
            history: tuple[int, ...] = ()
            async with limit:
                for number in range(TURNS):
                    turn = chats.next_turn(chat, history, number)
                    for each in (turn, fork_of(turn)):
                        await ask(stub, each, result)
                    history = history_after(turn, result)

        await asyncio.gather(*map(chat_of, range(chats.count)))
    return result


class Warm:
    """The clients of the deployment with a cache.

    Args:
        expected: answers of the cold deployment.
    """

    def __init__(self, running: Running, expected: Result, concurrency: int, seed: int) -> None:
        self.tally = Tally()
        self._running = running
        self._expected = expected
        self._concurrency = concurrency
        self._rng = random.Random(seed)

    async def play(self, rounds: Sequence[list[Turn]], *, kills: bool) -> None:
        """Send the turns of each round, with ``kills`` until the killed workers are ready again."""
        for number, turns in enumerate(rounds):
            killer = asyncio.create_task(asyncio.to_thread(self._kill, number)) if kills else None
            async with aio.insecure_channel(self._running.grpc_target) as channel:
                stub = InferenceStub(channel)
                await self._send_all(stub, turns)
                while killer and not killer.done():
                    await self._send_all(stub, self._rng.sample(turns, min(len(turns), 20)))
            if killer:
                await killer
            await asyncio.to_thread(self._running.wait_until_idle)
            console.print(f"turn {number}: {self.tally.summary}", soft_wrap=True)

    async def _send_all(self, stub: "InferenceAsyncStub", turns: Sequence[Turn]) -> None:
        queue = self._rng.sample(turns, len(turns))

        async def client() -> None:
            while queue:
                await self._send(stub, queue.pop())

        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(client())

    async def _send(self, stub: "InferenceAsyncStub", turn: Turn) -> None:
        if self._rng.random() < HANG_UP:
            await self._hang_up(stub, turn)
        result = Result()
        for attempt in range(REPEATS):
            try:
                await ask(stub, turn, result)
                break
            except grpc.RpcError as error:
                if turn.choices == 1 or attempt == REPEATS - 1:
                    self.tally.different.append(f"{turn.case.name}: {error!r}"[:400])
                    return
                self.tally.repeated += 1
        name = turn.case.name
        self.tally.add(turn, self._expected.answers[name], result.answers[name])
        self.tally.cached += result.cached[name]
        self.tally.prompt += len(turn.case.prompt)

    async def _hang_up(self, stub: "InferenceAsyncStub", turn: Turn) -> None:
        """Send the prompt with other tokens behind it, and cancel the call after a random time."""
        self.tally.cancelled += 1
        call = stub.Generate(request_of(fork_of(fork_of(turn))))
        try:
            async with asyncio.timeout(self._rng.expovariate(20)):
                async for _ in call:
                    pass
        except TimeoutError:
            call.cancel()
        except grpc.RpcError:
            pass  # its worker was killed

    def _kill(self, number: int) -> None:
        """Kill a worker of each role while it has requests, and wait until they are ready again."""
        running, killed = self._running, {}
        for role in ("prefill", "decode"):
            workers = sorted(name for name in running.workers() if name.startswith(role))
            if not workers:
                continue
            worker = workers[number % len(workers)]
            deadline = time.monotonic() + 20
            while not running.workers()[worker]["queue_tokens"] and time.monotonic() < deadline:
                time.sleep(0.02)
            killed[worker] = running.workers()[worker]["epoch"]
            os.kill(running.state.pids[worker], signal.SIGKILL)
        for worker, epoch in killed.items():
            running.wait_for_new_epoch(worker, epoch)
            console.print(f"turn {number}: {worker} was killed and is ready again")


def _settings(cache: bool, kv_tokens: int | None, kills: bool) -> dict[str, str]:
    found = dict(KILLED) if kills else {}
    for role in ("PREFILL", "DECODE"):
        found[f"HEADRACE_{role}_PREFIX_CACHE"] = str(cache).lower()
        if kv_tokens is not None and cache:
            found[f"HEADRACE_{role}_KV_TOKENS"] = str(kv_tokens)
    return found


def run(own: argparse.Namespace) -> Tally:
    """Compare both deployments, see the module."""
    model = DEFAULT_MODEL if own.model == DEFAULT_MODEL else str(RandomModel(own.model).ensure())
    text = load_tokenizer(resolve_model(model)).encode(documentation()[1])
    chats = Chats(text, own.chats, own.seed, answer_tokens=own.answer_tokens)
    flags = ["--model", model, "--kv-format", own.kv_format]
    with deployed(*flags, environment=_settings(False, None, False)) as running:
        running.wait_for_all_workers()
        cold = asyncio.run(play_cold(running, chats, own.concurrency))
    rounds = [
        [each for turns in chats.turns for each in (turns[at], fork_of(turns[at]))]
        for at in range(TURNS)
    ]
    flags += ["--colocated"] if own.colocated else ["--prefill", str(own.prefill)]
    flags += ["--decode", str(own.decode)]
    with tempfile.TemporaryDirectory() as folder:
        points = Points(Path(folder))
        environment = _settings(True, own.kv_tokens, own.kills) | points.environment
        with deployed(*flags, environment=environment, patient=not own.kills) as running:
            running.wait_for_all_workers()
            warm = Warm(running, cold, own.concurrency, own.seed)
            asyncio.run(warm.play(rounds, kills=own.kills))
            failovers = running.gateway_metric("headrace_failovers_total")
            console.print(f"{failovers:.0f} failovers, {points.preemptions} preemptions")
            for worker in sorted(running.workers()):
                evicted = running.metric(worker, "headrace_prefix_cache_evictions_total")
                computed = running.metric(worker, COMPUTED_HERE)
                console.print(
                    f"{worker}, since its start: {evicted:.0f} pages evicted, {computed:.0f} "
                    "prompts computed beside a prefill worker"
                )
    return warm.tally


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the program."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.chat_faults")
    add = parser.add_argument
    add("--chats", type=int, default=66, help="number of chats of three turns and forks")
    add("--model", default="tiny", help=f"shape of a random model, or {DEFAULT_MODEL}")
    add("--kv-format", default="dense", help="KV format of the workers")
    add("--prefill", type=int, default=1, help="number of prefill workers")
    add("--decode", type=int, default=1, help="number of decode workers")
    add("--colocated", action="store_true", help="decode workers compute all prompts")
    add("--kv-tokens", type=int, help="size of the KV page pools in tokens")
    add("--answer-tokens", type=int, default=ANSWER, help="length of each answer")
    add("--kills", action="store_true", help="kill workers in each round")
    add("--concurrency", type=int, default=8)
    add("--seed", type=int, default=3)
    return parser.parse_args(arguments)


def main() -> int:
    own = parse()
    tally = run(own)
    console.print(f"{own.kv_format}: {tally.summary}", soft_wrap=True)
    for line in (*tally.close, *tally.different):
        console.print(line, markup=False)
    return bool(tally.different)


if __name__ == "__main__":
    sys.exit(main())
