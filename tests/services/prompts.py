"""Requests with given prompts to workers of one process, and checks of what they have cached."""

from collections.abc import AsyncIterator, Sequence
from itertools import count

import pytest

from headrace.v1 import decode_pb2, sampling_pb2
from runtime.core.request import Request
from services.common.token_ids import pack_tokens
from services.worker.streams import StreamSession
from tests.runtime.tiny import prompt_of
from tests.services.workers import (
    LIMIT_S,
    Decode,
    Prefill,
    message_of,
    output_of,
    start_stream,
    until,
)

PAGE = 16
"""Tokens in a page."""
ANSWER = 20
"""Default number of output tokens."""
_numbers = count(1)


async def ask(
    decode: Decode | Prefill,
    prefill: Prefill | None,
    tokens: Sequence[int],
    *,
    choices: int = 1,
    answer: int = ANSWER,
    salt: bytes = b"",
    replayed: int = 0,
) -> decode_pb2.StreamDelta:
    """Return all output of a request; see `send`."""
    session = send(
        decode, prefill, tokens, choices=choices, answer=answer, salt=salt, replayed=replayed
    )
    await until(lambda: not session.streams)
    return output_of(session)


def send(
    decode: Decode | Prefill,
    prefill: Prefill | None,
    tokens: Sequence[int],
    *,
    choices: int = 1,
    answer: int = ANSWER,
    salt: bytes = b"",
    replayed: int = 0,
) -> StreamSession:
    """Start a stream.

    Args:
        prefill: its prefill worker; None if the decode worker computes the prompt.
        answer: maximum number of output tokens.
        replayed: number of output tokens of an earlier attempt, at the end of ``tokens``.
    """
    start = decode_pb2.StartStream(
        stream=next(_numbers), epoch=decode.worker.identity.epoch, deadline_s=LIMIT_S
    )
    start.request.CopyFrom(message_of(len(tokens) - replayed, answer))
    start.request.tokens = pack_tokens(tokens)
    start.request.choices = choices
    start.request.cache_salt = salt
    start.request.sampling.CopyFrom(
        sampling_pb2.Sampling(temperature=0.9, top_p=1.0, repetition_penalty=1.0, seed=11)
    )
    if prefill is not None:
        start.prefill.CopyFrom(prefill.address)
    return start_stream(decode.worker.service, start)


def ids_of(output: decode_pb2.StreamDelta, choice: int = 0) -> list[int]:
    """Return the output tokens of a choice."""
    return [token.token for token in output.tokens if token.choice == choice]


async def chat_turns(
    decode: Decode, prefill: Prefill, cold: Decode
) -> AsyncIterator[decode_pb2.StreamDelta]:
    """Play four turns of a chat, the third with three choices, of which the last is continued.

    Yields:
        The output of each turn, with the tokens of a worker without cached pages.
    """
    prompt = list(prompt_of(120))
    for turn in range(4):
        choices = 1 + 2 * (turn == 2)
        found = await ask(decode, prefill, prompt, choices=choices)
        expected = await ask(cold, None, prompt, choices=choices)
        assert not found.HasField("error")
        for choice in range(choices):
            assert ids_of(found, choice) == ids_of(expected, choice)
        await check_idle(prefill, decode)
        yield found
        prompt += [*ids_of(found, choices - 1), *prompt_of(15, seed=turn)]


def evict_after(monkeypatch: pytest.MonkeyPatch, decode: Decode, hint: str) -> None:
    """Let all cached pages be evicted after a call of the method ``hint`` of the engine thread."""
    engine = decode.worker.engine
    call = getattr(engine, hint)

    def call_and_evict(request: Request) -> int | None:
        found: int | None = call(request)
        pool = decode.loaded.engine.scheduler.pages.pools[0]
        for page in range(pool.total):
            pool.forget(page)
        return found

    monkeypatch.setattr(engine, hint, call_and_evict)


def value_of(worker: Prefill | Decode, name: str, **labels: str) -> float:
    """Return the value of a metric of a worker."""
    worker.worker.observe()
    return worker.worker.metrics.registry.get_sample_value(f"headrace_{name}", labels) or 0.0


async def check_idle(*workers: Prefill | Decode) -> None:
    """Wait until all pages of workers are free and no request is left."""
    for each in workers:
        engine = each.worker.engine
        await until(lambda e=engine: e.load.pages_free == e.pages_total)  # type: ignore[misc]
        await until(lambda w=each.worker: w.idle)  # type: ignore[misc]
