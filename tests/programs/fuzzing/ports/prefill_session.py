"""Sessions with a prefill worker: mutated commands of decode workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from grpc import aio

from headrace.v1 import prefill_pb2 as pb
from tests.programs.fuzzing.messages import mutated
from tests.programs.fuzzing.ports.base import Port, Wrong
from tests.programs.fuzzing.ports.workers import REFUSED, RawCall, Workers, channel_to
from tests.services.workers import SLOT_BYTES, start_of

METHOD = "/headrace.v1.Prefill/Session"
COMMANDS = 40
"""Number of commands in a session, unless it ends earlier."""


class PrefillSessionPort(Port):
    """The port of a prefill worker."""

    def __init__(self, workers: Workers, channel: aio.Channel) -> None:
        super().__init__()
        self._workers = workers
        self._channel = channel
        compatibility = workers.prefill.loaded.identity.compatibility_message()
        self._hello = pb.Hello(
            worker_id="reader",
            epoch="0" * 32,
            expected_epoch=workers.prefill.address.epoch,
            compatibility=compatibility,
            slot_bytes=SLOT_BYTES,
            endpoints=[workers.decode.worker.endpoints[0].connection],
        )

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator["PrefillSessionPort"]:
        async with Workers.opened() as workers:
            port = int(workers.prefill.address.address.rpartition(":")[2])
            async with channel_to(port) as channel:
                yield cls(workers, channel)

    async def send(self, rng: Random, count: int) -> None:
        while count > 0:
            count -= await self._session(rng, min(count, COMMANDS))

    async def _session(self, rng: Random, count: int) -> int:
        """Send up to ``count`` messages in one session; return their number."""
        forged = rng.random() < 0.05
        call = RawCall(self._channel, METHOD, **({"token": "forged"} if forged else {}))
        hello = pb.PrefillCommand(hello=self._hello)
        sent = 1
        started = [1]
        alive = await call.write(self._message(hello, rng, 0.15))
        while alive and sent < count:
            command = self._command(rng, started)
            alive = await call.write(self._message(command, rng, 0.8))
            sent += 1
        status = await call.end(cancel=rng.random() < 0.3)
        if forged and (status not in REFUSED or call.answers):
            raise Wrong(f"a session with a wrong token ended with {status}")
        for answer in call.answers:
            pb.PrefillEvents.FromString(answer)
        self.outcomes[status.name] += sent
        return sent

    def _message(self, command: pb.PrefillCommand, rng: Random, share: float) -> bytes:
        message = pb.PrefillCommands(commands=[command])
        return mutated(message, rng) if rng.random() < share else message.SerializeToString()

    def _command(self, rng: Random, started: list[int]) -> pb.PrefillCommand:
        """Return a valid command; ``started`` are the sequences so far."""
        sequence = rng.choice(started)
        match rng.randrange(8):
            case 0 | 1 | 2:
                started.append(started[-1] + 1)
                start = start_of(rng.choice((1, 16, 40, 100)), rng.choice((1, 8)), started[-1])
                start.cached = rng.random() < 0.2
                return pb.PrefillCommand(start=start)
            case 3 | 4:
                return pb.PrefillCommand(credit=pb.Credit(sequence=sequence, segments=2))
            case 5 | 6:
                timing = pb.SegmentTiming(read_s=1e-4, decode_s=1e-4)
                done = pb.Acknowledge(sequence=sequence, index=rng.randrange(3), timing=timing)
                return pb.PrefillCommand(acknowledge=done)
        return pb.PrefillCommand(release=pb.ReleaseLease(sequence=sequence))

    async def check(self) -> None:
        await self._workers.check()
