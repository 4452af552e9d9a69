"""Sessions with a decode worker: mutated commands of gateways."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from grpc import aio

from headrace.v1 import decode_pb2 as pb
from tests.programs.fuzzing.messages import mutated
from tests.programs.fuzzing.ports.base import Port, Wrong
from tests.programs.fuzzing.ports.workers import REFUSED, RawCall, Workers, channel_to
from tests.services.workers import message_of

METHOD = "/headrace.v1.Decode/Session"
COMMANDS = 40
"""Number of commands in a session, unless it ends earlier."""


class DecodeSessionPort(Port):
    """The port of a decode worker."""

    def __init__(self, workers: Workers, channel: aio.Channel) -> None:
        super().__init__()
        self._workers = workers
        self._channel = channel

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator["DecodeSessionPort"]:
        async with Workers.opened() as workers, channel_to(workers.decode_port) as channel:
            yield cls(workers, channel)

    async def send(self, rng: Random, count: int) -> None:
        while count > 0:
            count -= await self._session(rng, min(count, COMMANDS))

    async def _session(self, rng: Random, count: int) -> int:
        """Send up to ``count`` messages in one session; return their number."""
        forged = rng.random() < 0.05
        call = RawCall(self._channel, METHOD, **({"token": "forged"} if forged else {}))
        sent, alive = 0, True
        while alive and sent < count:
            command = self._command(rng, sent)
            is_mutated = rng.random() < 0.8
            data = mutated(command, rng) if is_mutated else command.SerializeToString()
            alive = await call.write(data)
            sent += 1
        status = await call.end(cancel=rng.random() < 0.3)
        if forged and (status not in REFUSED or call.answers):
            raise Wrong(f"a session with a wrong token ended with {status}")
        for answer in call.answers:
            pb.DecodeStep.FromString(answer)
        self.outcomes[status.name] += sent
        return sent

    def _command(self, rng: Random, number: int) -> pb.DecodeCommand:
        """Return a valid command."""
        if rng.random() < 0.2:
            return pb.DecodeCommand(cancel=pb.CancelStream(stream=rng.randrange(number + 1)))
        workers = self._workers
        fetched = rng.random() < 0.7
        start = pb.StartStream(
            stream=number,
            epoch=workers.decode.worker.identity.epoch,
            prefill=workers.prefill.address if fetched else None,
            deadline_s=5.0,
            request=message_of(rng.choice((1, 16, 40, 100)), rng.choice((1, 4))),
        )
        return pb.DecodeCommand(start=start)

    async def check(self) -> None:
        await self._workers.check()
