"""A gateway's session with a decode worker: mutated steps of the worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

from grpc import aio

from headrace.v1 import decode_pb2 as pb
from tests.programs.fuzzing.messages import mutated
from tests.programs.fuzzing.ports.base import Port, Wrong
from tests.programs.fuzzing.ports.gateway_http import parsed
from tests.programs.fuzzing.ports.gateways import TEXT, check_gateway, gateway
from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import STOP, FakeStream, Script

REQUESTS = 32
"""Number of requests at the same time."""
TYPED = {200, 400, 408, 429, 500, 503, 504}  # 500: the worker violated the protocol, or said so


class WorkerStepsPort(Port):
    """A gateway whose worker sends mutated steps in half of the streams."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site
        self._sent = 0
        self._words = site.encode(TEXT)

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator["WorkerStepsPort"]:
        async with gateway() as site:
            yield cls(site)

    async def send(self, rng: Random, count: int) -> None:
        site, ordinary, end = self._site, self._site.worker.script, self._sent + count
        settings = site.gateway.settings
        # Mutated streams often do not end. The ordinary request of `check` gets more time.
        site.gateway.settings = settings.model_copy(update={"deadline_s": 1.0})
        site.worker.script = self._script(rng)
        while self._sent < end:
            async with asyncio.TaskGroup() as clients:
                for _ in range(REQUESTS):
                    clients.create_task(self._request(rng.random() < 0.5))
        site.worker.script = ordinary
        site.gateway.settings = settings

    async def _request(self, streams: bool) -> None:
        body = {"prompt": "x", "max_tokens": 8, "temperature": 0, "stream": streams, "logprobs": 1}
        answer = await self._site.http.post("/v1/completions", json=body)
        self.outcomes[str(answer.status_code)] += 1
        if answer.status_code not in TYPED:
            raise Wrong(f"a request was answered with {answer.status_code}: {answer.text[:500]}")
        events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
        for text in events if streams and answer.status_code == 200 else [answer.text]:
            if text != "[DONE]":
                parsed(text)

    def _script(self, rng: Random) -> Script:
        async def script(stream: FakeStream) -> None:
            with suppress(aio.UsageError, aio.InternalError):  # the gateway ended the session
                for step in self._steps(stream):
                    self._sent += 1
                    self.outcomes["step"] += 1
                    data = mutated(step, rng) if rng.random() < 0.4 else step.SerializeToString()
                    await stream.send_bytes(data)

        return script

    def _steps(self, stream: FakeStream) -> list[pb.DecodeStep]:
        """Return valid steps of a stream."""
        number, first = stream.start.stream, stream.replayed
        steps = [
            pb.DecodeStep(deltas=[pb.StreamDelta(stream=number)])
            for _ in range(len(self._words) - first + 1)
        ]
        for index, (step, word) in enumerate(zip(steps, self._words[first:], strict=False), first):
            top: Any = [{"token": word, "logprob": -0.5}]
            step.deltas[0].tokens.add(choice=0, index=index, token=word, logprob=-0.5, top=top)
        steps[-1].deltas[0].ended.add(choice=0, reason=STOP)
        steps[-1].deltas[0].stages.CopyFrom(pb.StageTimes(queue=0.1, prefill=0.1, decode=0.1))
        return steps

    async def check(self) -> None:
        await check_gateway(self._site)
