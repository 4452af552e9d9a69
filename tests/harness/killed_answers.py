"""Chats whose worker is killed in mid-answer."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.harness.deployment import Running

_CHATS = 4
_TIMEOUT_S = 300


@dataclass
class StreamedAnswer:
    """An answer as its client received it.

    Attributes:
        text: content, and arguments of calls.
        reason: the finish reason; empty if the stream has not ended.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: str = ""

    def add(self, event: dict[str, Any]) -> None:
        """Add the content of an event of the stream."""
        assert "error" not in event, event
        for choice in event["choices"]:
            self.tokens += choice.get("token_ids") or []
            self.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                self.text += call["function"]["arguments"]
            self.reason = choice["finish_reason"] or ""


async def answers_to(
    client: httpx.AsyncClient,
    bodies: Sequence[Mapping[str, Any]],
    answers: Sequence[StreamedAnswer],
    grown: Callable[[], None] = lambda: None,
) -> None:
    """Ask for one choice of each chat, all at the same time.

    Args:
        answers: grow with the events of the streams.
        grown: called after each event.

    Raises:
        AssertionError: the gateway answers with an error.
    """

    async def ask(body: Mapping[str, Any], answer: StreamedAnswer) -> None:
        fields = {**body, "stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/chat/completions", json=fields) as response:
            assert not response.is_error, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.add(json.loads(line[6:]))
                    grown()

    await asyncio.gather(*map(ask, bodies, answers))


def client_of(running: Running) -> httpx.AsyncClient:
    """Return a client of the gateway for any number of streams."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=running.url, trust_env=False, timeout=_TIMEOUT_S, limits=limits
    )


async def texts_despite_a_kill(running: Running, body: Mapping[str, Any], sent: int) -> list[str]:
    """Return the answers to chats with different seeds, content and arguments of calls as one text.

    Each chat is asked twice. The second time, the decode worker that has sent most of the tokens is
    killed after ``sent`` tokens of each answer; the texts and tokens must be the same.
    """
    bodies = [{**body, "seed": seed} for seed in range(_CHATS)]
    expected, found = _empty(), _empty()
    all_sent = asyncio.Event()

    def check() -> None:
        if all(len(answer.tokens) > sent for answer in found):
            all_sent.set()

    async with client_of(running) as client:
        await answers_to(client, bodies, expected)
        epochs = {name: worker["epoch"] for name, worker in running.workers().items()}
        decoders = [name for name in epochs if name.startswith("decode")]
        before = {name: _decoded(running, name) for name in decoders}
        asking = asyncio.create_task(answers_to(client, bodies, found, check))
        await all_sent.wait()
        victim = max(before, key=lambda name: _decoded(running, name) - before[name])
        os.kill(running.state.pids[victim], signal.SIGKILL)
        await asking
        assert found == expected
        await asyncio.to_thread(running.wait_for_new_epoch, victim, epochs[victim])
    assert running.gateway_metric("headrace_failovers_total") > 0
    return [answer.text for answer in found]


def _empty() -> list[StreamedAnswer]:
    return [StreamedAnswer() for _ in range(_CHATS)]


def _decoded(running: Running, worker: str) -> float:
    """Return the number of tokens that a worker has generated."""
    return running.metric(worker, "headrace_worker_generation_tokens_total")
