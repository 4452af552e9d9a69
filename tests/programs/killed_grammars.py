"""Constrained chats whose worker is killed: answers are valid, and tokens as without the kill.

``python -m tests.programs.killed_grammars`` starts a deployment of one prefill and several decode
workers with a small random model. In each round, chats with random JSON schemas are answered twice
at the same time. The second time, a decode worker is killed at a random point; the gateway
continues its answers on the others. *Interrupted* answers are those that the gateway has continued
(``headrace_failovers_total``). The program ends after ``--kills`` kills and ``--answers``
interrupted answers.

It fails if an answer has other tokens than without the kill, or if a finished answer does not
validate against its schema.
"""

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from tests.harness.deployment import Running, deployed
from tests.harness.killed_answers import StreamedAnswer, answers_to, client_of
from tests.harness.random_model import RandomModel
from tests.programs.chat_faults import KILLED
from tests.runtime.grammar.schemas import random_schema
from tests.runtime.grammar.validation import faults

console = Console(soft_wrap=True, highlight=False)


@dataclass
class Tally:
    """Results of all rounds.

    Attributes:
        kills: number of killed workers.
        interrupted: number of answers that were continued on another worker.
        answers, finished: number of answers beside kills, and of those that ended by themselves.
        wrong: descriptions of answers that differ or do not validate.
    """

    kills: int = 0
    interrupted: int = 0
    answers: int = 0
    finished: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, body: dict[str, Any], expected: StreamedAnswer, found: StreamedAnswer) -> None:
        """Compare the answers to a chat without and with a kill."""
        self.answers += 1
        if found != expected:
            self.wrong.append(f"expected {expected}, but got {found}")
        if found.reason != "stop":
            return
        self.finished += 1
        try:
            reasons = faults(
                json.loads(found.text), body["response_format"]["json_schema"]["schema"]
            )
        except ValueError as error:
            reasons = [str(error)]
        if reasons:
            self.wrong.append(f"{found.text!r} is not valid: {reasons[0]}")


def chat(random: Random, model: str, max_tokens: int) -> dict[str, Any]:
    """Return a request for a chat with a random schema."""
    schema = random_schema(random)
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Write JSON number {random.random()}."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "temperature": 1.0,
        "seed": random.randrange(1 << 30),
        "max_tokens": max_tokens,
    }


async def play(running: Running, options: "Options", tally: Tally) -> None:
    """Kill workers until there were enough kills and interrupted answers."""
    random = Random(options.seed)
    async with client_of(running) as client:
        while tally.kills < options.kills or tally.interrupted < options.answers:
            bodies = [chat(random, running.model, options.max_tokens) for _ in range(options.chats)]
            expected = [StreamedAnswer() for _ in bodies]
            await answers_to(client, bodies, expected)
            before = running.gateway_metric("headrace_failovers_total")
            victim = f"decode-{tally.kills % options.decode}"
            found = await with_kill(running, client, bodies, expected, victim, random)
            for body, one, other in zip(bodies, expected, found, strict=True):
                tally.add(body, one, other)
            tally.kills += 1
            tally.interrupted += round(running.gateway_metric("headrace_failovers_total") - before)
            console.print(
                f"{tally.kills} kills, {tally.interrupted} interrupted answers, "
                f"{len(tally.wrong)} wrong",
                markup=False,
            )


async def with_kill(
    running: Running,
    client: httpx.AsyncClient,
    bodies: list[dict[str, Any]],
    expected: list[StreamedAnswer],
    victim: str,
    random: Random,
) -> list[StreamedAnswer]:
    """Ask chats again, and kill a worker after a random number of their tokens."""
    pid, epoch = running.state.pids[victim], running.workers()[victim]["epoch"]
    total = sum(len(answer.tokens) for answer in expected)
    until = random.uniform(0.05, 0.35) * total
    found = [StreamedAnswer() for _ in bodies]
    reached = asyncio.Event()

    def check() -> None:
        if sum(len(answer.tokens) for answer in found) >= until:
            reached.set()

    asking = asyncio.create_task(answers_to(client, bodies, found, check))
    await reached.wait()
    os.kill(pid, signal.SIGKILL)
    await asking
    await asyncio.to_thread(running.wait_for_new_epoch, victim, epoch)
    return found


@dataclass(frozen=True)
class Options:
    """Arguments of the program."""

    kills: int
    answers: int
    chats: int
    decode: int
    max_tokens: int
    seed: int


def main(
    kills: Annotated[int, typer.Option(help="killed workers, at least")] = 1,
    answers: Annotated[int, typer.Option(help="interrupted answers, at least")] = 300,
    chats: Annotated[int, typer.Option(help="answers at the same time")] = 160,
    decode: Annotated[int, typer.Option(help="decode workers, at least two")] = 2,
    max_tokens: Annotated[int, typer.Option(help="limit of each answer")] = 400,
    shape: Annotated[str, typer.Option(help="shape of the random model")] = "tiny",
    seed: int = 41,
) -> None:
    """Print the results; exit with 1 if an answer is wrong."""
    tally = Tally()
    model = RandomModel(shape).ensure()
    flags = ["--model", str(model), "--prefill", "1", "--decode", str(decode)]
    with deployed(*flags, environment=KILLED, patient=False) as running:
        running.wait_for_all_workers()
        options = Options(kills, answers, chats, decode, max_tokens, seed)
        asyncio.run(play(running, options, tally))
    console.print(
        f"{tally.kills} kills, {tally.interrupted} interrupted of {tally.answers} answers; "
        f"{tally.finished} finished within {max_tokens} tokens; {len(tally.wrong)} wrong"
    )
    for line in tally.wrong[:20]:
        console.print(line, markup=False)
    raise typer.Exit(bool(tally.wrong))


if __name__ == "__main__":
    typer.run(main)
