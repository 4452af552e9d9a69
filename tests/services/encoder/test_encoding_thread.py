"""The encoding thread: results, refusals, cancellation and faults."""

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest

from headrace.v1 import error_pb2
from runtime.encoder.model import EncoderInput
from services.encoder.encoding_thread import EncodeFailure, EncodingThread
from tests.services.encoder.samples import FakeEncoder
from tests.services.workers import until

LIMIT_S = 20.0


class Running:
    def __init__(self) -> None:
        self.encoder = FakeEncoder()
        self.faults: list[BaseException] = []
        self.thread = EncodingThread(
            self.encoder, batch_tokens=32, max_queue_tokens=100, on_fault=self.faults.append
        )
        self.thread.start()

    async def encode(self, *lengths: int) -> list[tuple[float, ...]]:
        call = self.thread.submit(inputs_of(*lengths))
        encoded = await asyncio.wait_for(call.result, LIMIT_S)
        return [struct.unpack("<2f", output) for output in encoded.outputs]

    async def blocked(self, *lengths: int) -> "asyncio.Task[list[tuple[float, ...]]]":
        """Start a call whose first batch waits for the gate."""
        self.encoder.gate.clear()
        task = asyncio.create_task(self.encode(*lengths))
        await asyncio.to_thread(self.encoder.entered.acquire)
        return task


def inputs_of(*lengths: int) -> list[EncoderInput]:
    return [EncoderInput((1,) * length) for length in lengths]


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    made = Running()
    yield made
    made.encoder.gate.set()
    await made.thread.stop()


async def test_outputs_are_in_the_order_of_the_inputs(running: Running) -> None:
    lengths = (30, 2, 17, 2, 40, 1)
    assert await running.encode(*lengths) == [(length, length) for length in lengths]
    load = running.thread.load
    assert (load.inputs, load.tokens, load.queue_tokens, load.calls) == (6, 92, 0, 1)
    assert len(running.thread.batch_times) == load.batches == len(running.encoder.batches)


async def test_calls_share_batches(running: Running) -> None:
    first = await running.blocked(32)
    others = [asyncio.create_task(running.encode(4)) for _ in range(5)]
    await until(lambda: running.thread.load.waiting == 5)
    running.encoder.gate.set()
    await asyncio.gather(first, *others)
    assert running.encoder.batches == [[32], [4] * 5]


async def test_call_beyond_the_limit_is_refused(running: Running) -> None:
    first = await running.blocked(60)
    with pytest.raises(EncodeFailure, match="60 tokens are queued") as refused:
        running.thread.submit(inputs_of(41))
    assert refused.value.code == error_pb2.ERROR_CODE_OVERLOADED
    second = running.thread.submit(inputs_of(40))
    running.encoder.gate.set()
    await asyncio.gather(first, second.result)


async def test_idle_worker_accepts_a_call_beyond_the_limit(running: Running) -> None:
    assert await running.encode(300) == [(300, 300)]


async def test_cancelled_call_is_not_computed(running: Running) -> None:
    first = await running.blocked(32)
    call = running.thread.submit(inputs_of(10, 20))
    running.thread.cancel(call)
    running.thread.cancel(call)
    assert running.thread.load.queue_tokens == 32
    running.encoder.gate.set()
    await first
    assert running.encoder.batches == [[32]]


async def test_call_cancelled_during_its_batch_does_not_disturb_others(running: Running) -> None:
    task = await running.blocked(8, 32)
    call = running.thread.submit(inputs_of(2))
    task.cancel()
    running.encoder.gate.set()
    await asyncio.wait_for(call.result, LIMIT_S)
    await until(lambda: running.thread.load.queue_tokens == 0)


async def test_output_that_is_not_finite_fails_its_call_only(running: Running) -> None:
    first = await running.blocked(32)
    bad = running.thread.submit([EncoderInput((99, 1))])
    good = asyncio.create_task(running.encode(2))
    running.encoder.gate.set()
    with pytest.raises(EncodeFailure) as failed:
        await bad.result
    assert failed.value.code == error_pb2.ERROR_CODE_NOT_FINITE
    assert await good == [(2, 2)]
    await first
    assert running.thread.not_finite == 1


async def test_invalid_input_is_refused_before_it_is_queued(running: Running) -> None:
    with pytest.raises(EncodeFailure, match="token 13") as refused:
        running.thread.submit([EncoderInput((1,)), EncoderInput((13, 1))])
    assert refused.value.code == error_pb2.ERROR_CODE_INVALID
    assert (running.thread.load.calls, running.thread.load.queue_tokens) == (0, 0)


async def test_exception_of_the_encoder_is_a_fault(running: Running) -> None:
    running.encoder.error = RuntimeError("the device is lost")
    call = running.thread.submit(inputs_of(2))
    await until(lambda: bool(running.faults))
    assert str(running.faults[0]) == "the device is lost"
    assert not call.result.done()
