"""Messages between the sessions of a gateway and a worker: their sizes, and ends of choices."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from headrace.v1 import decode_pb2, decode_pb2_grpc, request_pb2, sampling_pb2
from runtime.core.request import FinishReason, SampledToken
from services.common.errors import TooLarge
from services.common.grpc_server import MAX_ITEM_BYTES, MAX_MESSAGE_BYTES, GrpcServer, MessageStream
from services.common.placement import WorkerAddress
from services.common.token_ids import pack_tokens
from services.gateway.sessions import SessionPool, WorkerSession, WorkerStream
from services.gateway.settings import GatewaySettings
from services.worker.streams import Stream, StreamSession
from tests.services.gateway.fakes import until

ALTERNATIVES = tuple((100_000 + i, -1.5 - i) for i in range(100))


class Worker(decode_pb2_grpc.DecodeServicer):
    """A worker's session without an engine."""

    def __init__(self) -> None:
        self.session: StreamSession | None = None
        self.opened: list[Stream] = []
        self.dropped: list[Stream] = []
        self.cancelled: list[tuple[int, int]] = []

    async def Session(  # type: ignore[override]
        self, _commands: object, context: MessageStream
    ) -> None:
        self.session = StreamSession(
            "g",
            self.opened.append,
            self.dropped.append,
            lambda stream, choice: self.cancelled.append((stream.number, choice)),
        )
        await self.session.run(context)

    def push(self, stream: Stream, indices: Sequence[int]) -> None:
        assert self.session is not None
        for index in indices:
            token = SampledToken(0, index, 100_000, -1.0, ALTERNATIVES)
            self.session.push(stream, token)


@pytest.fixture
async def worker() -> Worker:
    return Worker()


@pytest.fixture
async def gate(worker: Worker) -> AsyncIterator[WorkerSession]:
    server = GrpcServer("127.0.0.1:0", ["headrace.v1.Decode"])
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server.server)
    await server.start()
    settings = {"connect_timeout_s": 30, "ping_timeout_s": 30, "stream_buffer_tokens": 1000}
    pool = SessionPool(GatewaySettings.model_validate(settings))
    address = f"127.0.0.1:{server.port}"
    yield pool.get(WorkerAddress(worker_id="w", epoch="e", address=address))
    await pool.close()
    await server.stop(0)


def start(tokens: Sequence[int] = (1,)) -> decode_pb2.StartStream:
    request = request_pb2.Request(
        request_id="r",
        placement_id="p",
        tokens=pack_tokens(tokens),
        prompt_tokens=len(tokens),
        sampling=sampling_pb2.Sampling(top_p=1, repetition_penalty=1, logprobs=100),
        max_tokens=8000,
        choices=1,
    )
    return decode_pb2.StartStream(epoch="e", deadline_s=60, request=request)


async def received(stream: WorkerStream) -> list[int]:
    """Return the indices of all tokens of a stream, up to its end."""
    indices: list[int] = []
    while True:
        for delta in await stream.next():
            indices += [token.index for token in delta.tokens]
            if delta.ended:
                return indices


async def test_output_that_has_collected_for_a_paused_gateway_is_complete(
    worker: Worker, gate: WorkerSession
) -> None:
    streams = [gate.start(start()) for _ in range(12)]
    await until(lambda: len(worker.opened) == 12)
    assert worker.session is not None
    for first in range(0, 1500, 500):  # steps of a batch, while the session cannot write
        for stream in worker.opened:
            worker.push(stream, range(first, first + 500))
    for stream in tuple(worker.opened):
        worker.session.finish(stream, 0, FinishReason.LENGTH)
    pending = decode_pb2.DecodeStep(deltas=worker.session.outbox.deltas.values())
    assert pending.ByteSize() > MAX_MESSAGE_BYTES
    async with asyncio.timeout(60):
        results = await asyncio.gather(*(received(stream) for stream in streams))
    assert all(result == list(range(1500)) for result in results)


async def test_request_that_is_too_large_for_a_message_does_not_end_other_streams(
    worker: Worker, gate: WorkerSession
) -> None:
    stream = gate.start(start())
    await until(lambda: len(worker.opened) == 1)
    with pytest.raises(TooLarge, match="can be sent to a worker"):
        gate.start(start([1] * (MAX_ITEM_BYTES // 4 + 1)))
    assert worker.session is not None
    worker.push(worker.opened[0], range(3))
    worker.session.finish(worker.opened[0], 0, FinishReason.LENGTH)
    assert await received(stream) == [0, 1, 2]


async def test_cancelled_choice_reaches_the_worker_and_its_stream_continues(
    worker: Worker, gate: WorkerSession
) -> None:
    message = start()
    message.request.choices = 3
    stream = gate.start(message)
    await until(lambda: len(worker.opened) == 1)
    stream.cancel_choice(1)
    stream.cancel_choice(1)
    await until(lambda: worker.cancelled == [(1, 1)])
    assert worker.session is not None
    worker.push(worker.opened[0], range(2))
    for choice in (0, 2):
        assert not worker.dropped
        worker.session.finish(worker.opened[0], choice, FinishReason.LENGTH)
    assert worker.dropped == worker.opened
    assert await received(stream) == [0, 1]
    stream.close()
    stream.cancel_choice(0)  # ignored
