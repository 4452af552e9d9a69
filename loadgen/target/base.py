"""Interface of targets, and code shared by their implementations."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, Protocol, TypeVar

from loadgen.clock import Clock
from loadgen.record import Failure, Record
from loadgen.schedule import ScheduledRequest
from loadgen.workload.base import Dialogue, Message, Role, Text

P = TypeVar("P")


class Endpoint(StrEnum):
    """Endpoint of OpenAI's API.

    Attributes:
        EMBEDDINGS: answers are not streamed. Each embedding counts as one output token.
    """

    COMPLETIONS = "completions"
    CHAT = "chat"
    EMBEDDINGS = "embeddings"


class Target(Protocol):
    """Server under test, which accepts any number of concurrent requests."""

    name: str
    """Address for reports, without credentials."""

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        """Send one request and write its result into ``record``.

        Failures of the target are recorded, not raised.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """Options common to all requests of a run.

    Attributes:
        model: model name as served by the target.
        timeout_s: maximum seconds from sending a request to the end of its answer.
        temperature: sampling temperature; 0 is greedy.
        ignore_eos: whether to generate up to ``max_tokens``; not supported by every server.
        keep_answers: whether to store text and token ids in the records.
        token_ids: whether answers must have token ids. Over HTTP they are requested with the field
            ``return_token_ids``, as in vLLM.
        texts: number of texts in each request for embeddings: the prompt, and its words in other
            orders.
        extra: additional fields of HTTP request bodies, such as ``{"top_k": 5}``.
    """

    model: str
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = False
    keep_answers: bool = False
    token_ids: bool = False
    texts: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


class RequestFailed(Exception):
    """Failure of a request. Targets raise it where they detect the failure; `finish` records it."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


class ClientCancelled(Exception):
    """Raised when the client cancels a request as scheduled."""


@asynccontextmanager
async def until_cancelled(scheduled: ScheduledRequest) -> AsyncIterator[None]:
    """Run the exchange with the target, until the time at which the client cancels it.

    Raises:
        ClientCancelled: if that time comes first.
    """
    try:
        async with asyncio.timeout(scheduled.cancel_at_s) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise ClientCancelled from None
        raise


def joined(prompt: Text | Dialogue) -> Text:
    """Return a prompt for an endpoint without messages."""
    return prompt.joined if isinstance(prompt, Dialogue) else prompt


def shuffles(prompt: Text | Dialogue, count: int) -> list[str] | list[list[int]]:
    """Return texts of about the same length: a prompt, and its words or tokens in other orders."""
    text = joined(prompt)
    if isinstance(text, str):
        return [" ".join(words) for words in _shuffled(text.split(" "), count)]
    return _shuffled(list(text), count)


def _shuffled(parts: list[P], count: int) -> list[list[P]]:
    return [parts, *(Random(seed).sample(parts, len(parts)) for seed in range(1, count))]


def messages(prompt: Text | Dialogue) -> list[tuple[Role, str]]:
    """Return roles and texts of a prompt for an endpoint with messages.

    Raises:
        UsageError: if the prompt is token ids.
    """
    if not isinstance(prompt, Dialogue):
        prompt = Dialogue((Message(Role.USER, prompt),))
    return prompt.texts


def add_chunk(record: Record, scheduled: ScheduledRequest, at: float, tokens: int) -> None:
    """Record a chunk of the answer.

    Raises:
        ClientCancelled: if the client cancels after this chunk.
    """
    record.times.append(at)
    record.counts.append(tokens)
    if scheduled.cancel_after is not None and sum(record.counts) >= scheduled.cancel_after:
        raise ClientCancelled


def finish(record: Record, clock: Clock, error: Exception | None) -> None:
    """Record the end of a request.

    Args:
        error: exception that ended it, or None if the answer is complete.

    Raises:
        Exception: ``error`` itself, if the target did not cause it.
    """
    record.ended = clock()
    if isinstance(error, ClientCancelled):
        record.cancelled = True
    elif isinstance(error, RequestFailed):
        record.failure = error.failure
        record.detail = str(error)
    elif isinstance(error, TimeoutError):
        record.failure = Failure.TIMEOUT
        record.detail = "no end within the time limit"
    elif error is not None:
        raise error
