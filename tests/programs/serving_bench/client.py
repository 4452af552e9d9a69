"""Requests of the cases that do not use a run of the load generator."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import count, islice
from types import MappingProxyType
from typing import Any

import uvloop

from loadgen.clock import Clock
from loadgen.config import WorkloadConfig
from loadgen.record import Record
from loadgen.runner import gc_frozen
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Options
from loadgen.target.choice import first_of, open_target
from loadgen.workload.base import RequestSpec
from loadgen.workload.tokenizer import open_tokenizer
from tests.programs.serving_bench.systems import Server


class RequestRefused(Exception):
    """A request of a measurement has failed."""


class Client:
    """Sends requests over persistent connections. Create it with `connected`."""

    def __init__(self, server: Server, timeout_s: float, extra: Mapping[str, Any]) -> None:
        options = Options(server.model, timeout_s, ignore_eos=True, extra={**extra})
        self._target = open_target(server.target, options)
        self._numbers = count()
        self.clock = Clock()

    async def send(self, spec: RequestSpec) -> Record:
        """Send one request now and return its record, also if it has failed."""
        record = self.start(spec)
        await self.finish(spec, record)
        return record

    def start(self, spec: RequestSpec) -> Record:
        """Return the record that `finish` fills while the answer arrives."""
        return Record(next(self._numbers), self.clock(), spec.input_tokens, spec.output_tokens)

    async def finish(self, spec: RequestSpec, record: Record) -> None:
        await self._target.send(ScheduledRequest(spec, record.due), record, self.clock)

    async def close(self) -> None:
        await self._target.close()


@asynccontextmanager
async def connected(
    server: Server, timeout_s: float, extra: Mapping[str, Any] = MappingProxyType({})
) -> AsyncIterator[Client]:
    """Open a client until the block ends.

    Args:
        timeout_s: time limit for each request, in seconds.
        extra: additional fields of the requests.
    """
    client = Client(server, timeout_s, extra)
    try:
        yield client
    finally:
        await client.close()


def prompts(server: Server, tokens: int, answer: int, seed: int, number: int) -> list[RequestSpec]:
    """Return requests with prompts of random token ids.

    Args:
        tokens: length of each prompt.
        answer: length of each answer.
    """
    workload = WorkloadConfig(inputs=f"fixed:{tokens}", outputs=f"fixed:{answer}", token_ids=True)
    with open_tokenizer(server.tokenizer, first_of(server.target), server.model, {}) as tokenizer:
        requests: Iterator[RequestSpec] = workload.open(tokenizer).requests(seed)
        return list(islice(requests, number))


def check(record: Record) -> Record:
    """Return the record of a complete answer.

    Raises:
        RequestRefused: if the request has failed.
    """
    if not record.succeeded:
        raise RequestRefused(f"{record.failure}: {record.detail}")
    return record


@contextmanager
def event_loop() -> Iterator[asyncio.Runner]:
    """Yield a runner with the event loop that the load generator uses."""
    with gc_frozen(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner
