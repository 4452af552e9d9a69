"""Chats whose worker is killed in mid-answer."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

import httpx

from tests.harness.deployment import Running

_CHATS = 4
_TIMEOUT_S = 300


async def texts_despite_a_kill(running: Running, body: Mapping[str, Any], sent: int) -> list[str]:
    """Return the answers to chats with different seeds, content and arguments of calls as one text.

    Each chat is asked twice. The second time, the decode worker that has sent most of the tokens is
    killed after ``sent`` tokens of each answer; the texts and tokens must be the same.
    """
    async with httpx.AsyncClient(
        base_url=running.url, trust_env=False, timeout=_TIMEOUT_S
    ) as client:
        started = [asyncio.Event() for _ in range(_CHATS)]

        async def ask(seed: int, event: asyncio.Event | None = None) -> tuple[str, list[int]]:
            fields = {**body, "seed": seed, "stream": True, "return_token_ids": True}
            text, tokens = "", list[int]()
            async with client.stream("POST", "/v1/chat/completions", json=fields) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    content = json.loads(line[6:])
                    assert "error" not in content, content
                    for choice in content["choices"]:
                        tokens += choice.get("token_ids") or []
                        text += choice["delta"].get("content") or ""
                        for call in choice["delta"].get("tool_calls", ()):
                            text += call["function"]["arguments"]
                    if event is not None and len(tokens) > sent:
                        event.set()
            return text, tokens

        expected = await asyncio.gather(*map(ask, range(_CHATS)))
        epochs = {name: worker["epoch"] for name, worker in running.workers().items()}
        decoders = [name for name in epochs if name.startswith("decode")]
        before = {name: _decoded(running, name) for name in decoders}
        asking = [asyncio.create_task(ask(seed, started[seed])) for seed in range(_CHATS)]
        await asyncio.gather(*(event.wait() for event in started))
        victim = max(before, key=lambda name: _decoded(running, name) - before[name])
        os.kill(running.state.pids[victim], signal.SIGKILL)
        assert await asyncio.gather(*asking) == expected
        await asyncio.to_thread(running.wait_for_new_epoch, victim, epochs[victim])
    assert running.gateway_metric("headrace_failovers_total") > 0
    return [text for text, _ in expected]


def _decoded(running: Running, worker: str) -> float:
    """Return the number of tokens that a worker has generated."""
    return running.metric(worker, "headrace_worker_generation_tokens_total")
