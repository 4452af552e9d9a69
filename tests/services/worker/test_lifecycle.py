"""A worker that drains: requests that outlast ``drain_s`` end with DRAINING, not with a lost call.

A gateway replays them on another worker, and does not count the worker as lost.
"""

import asyncio
from functools import partial
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.v1 import decode_pb2, decode_pb2_grpc, error_pb2
from headrace.v1 import prefill_pb2 as pb
from services.common.grpc_server import GrpcServer, MessageStream, next_message, open_channel
from services.common.placement import Role
from services.decode.settings import DecodeSettings
from services.worker import lifecycle
from services.worker.lifecycle import Worker
from services.worker.metrics import WorkerMetrics
from services.worker.process import _report_state
from services.worker.stream_service import SERVICE
from tests.services.workers import (
    LIMIT_S,
    Decode,
    Prefill,
    Site,
    message_of,
    open_stream,
    output_of,
    session_with,
    start_of,
    until,
)

TOKENS = 40


async def first_error(call: MessageStream) -> error_pb2.Error:
    """Return the error of the first stream that ends with one."""
    while True:
        step: decode_pb2.DecodeStep | None = await next_message(call)
        assert step is not None, "the call ended without an error of the stream"
        for delta in step.deltas:
            if delta.HasField("error"):
                return delta.error


def unfinished(decode: Decode, prefill: Prefill) -> decode_pb2.DecodeCommand:
    """Return the start of a stream whose prompt is never computed."""
    start = decode_pb2.StartStream(
        stream=1,
        epoch=decode.worker.identity.epoch,
        prefill=prefill.address,
        deadline_s=LIMIT_S,
        request=message_of(TOKENS),
    )
    return decode_pb2.DecodeCommand(start=start)


async def test_stream_that_outlasts_the_drain_ends_with_draining(
    site: Site, stop: asyncio.Event
) -> None:
    prefill, decode = await site.prefill(started=False), await site.decode(started=False)
    server = GrpcServer("127.0.0.1:0", [SERVICE])
    decode_pb2_grpc.add_DecodeServicer_to_server(decode.worker.service, server.server)
    settings = DecodeSettings.model_validate({"drain_s": 0.05})
    living = asyncio.create_task(lifecycle.run_worker(decode.worker, server, settings, Role.DECODE))
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        call: MessageStream = decode_pb2_grpc.DecodeStub(channel).Session()
        await call.write(unfinished(decode, prefill))
        await until(lambda: not decode.worker.idle)
        stop.set()
        error = await asyncio.wait_for(first_error(call), LIMIT_S)
        assert error.code == error_pb2.ERROR_CODE_DRAINING
        assert error.worker_id == decode.worker.identity.worker_id
        await asyncio.wait_for(living, LIMIT_S)


async def test_prefill_that_outlasts_the_drain_ends_with_draining(site: Site) -> None:
    """The lease is never read, so that the worker does not become idle."""
    prefill = await site.prefill()
    async with session_with(prefill) as session:
        await session.send(pb.PrefillCommand(start=start_of(TOKENS, sequence=1)))
        while (await session.event()).WhichOneof("event") != "first_tokens":
            pass
        assert not prefill.worker.idle
        prefill.worker.end_requests()
        event = await session.event()
        while event.WhichOneof("event") != "failed":
            event = await session.event()
        assert (event.failed.sequence, event.failed.error.code) == (
            1,
            error_pb2.ERROR_CODE_DRAINING,
        )
        assert prefill.worker.idle
        assert not prefill.worker.sender.active


async def test_stream_of_a_draining_prefill_worker_ends_with_draining(site: Site) -> None:
    prefill, decode = await site.prefill(started=False), await site.decode()
    stream = open_stream(decode, prefill, 1, TOKENS)
    await until(lambda: not prefill.worker.idle)
    prefill.worker.end_requests()
    await until(lambda: decode.worker.idle)
    error = output_of(stream.session).error
    assert error.code == error_pb2.ERROR_CODE_DRAINING
    assert error.worker_id == prefill.worker.identity.worker_id


@pytest.mark.parametrize("draining", [False, True])
async def test_readiness_follows_the_worker_unless_it_drains(draining: bool) -> None:
    served: list[bool] = []

    async def set_serving(serving: bool) -> None:
        served.append(serving)

    rounds: list[None] = []
    worker: Any = SimpleNamespace(
        observe=lambda: rounds.append(None),
        not_ready=None,
        draining=draining,
        metrics=WorkerMetrics(),
    )
    ready = partial(worker.metrics.registry.get_sample_value, "headrace_worker_ready")
    server: Any = SimpleNamespace(set_serving=set_serving)
    registrar: Any = SimpleNamespace(not_ready=None, unregistered=None, unmatched=None)
    tending = asyncio.create_task(_report_state(worker, server, registrar, 0.001))
    for reason in ("blocked", None):
        worker.not_ready = reason
        rounds.clear()
        await until(lambda: len(rounds) > 1)
        assert registrar.not_ready == (None if draining else reason)
        assert ready() == pytest.approx(nan if draining else float(reason is None), nan_ok=True)
    expected = [] if draining else [False, True]
    assert served == expected
    for name in ("unregistered", "unmatched"):
        setattr(registrar, name, "no requests from any router")
        rounds.clear()
        await until(lambda: len(rounds) > 1)
        assert registrar.not_ready is None  # routers are told only what the worker itself lacks
        expected += [] if draining else [False, True]
        assert served == expected[: len(expected) - (not draining)]
        setattr(registrar, name, None)
        rounds.clear()
        await until(lambda: len(rounds) > 1)
        assert served == expected
    tending.cancel()


@pytest.mark.parametrize("copy", ["b", "c"])
def test_digest_takes_the_first_copy_of_each_head(copy: str) -> None:
    """Copies of a KV head on several GPUs may differ; the first one is sent."""

    def digest(*of_ranks: dict[int, list[str]]) -> Any:
        def endpoint(found: dict[int, list[str]]) -> Any:
            return SimpleNamespace(digest=lambda *_, **__: found)

        executor = SimpleNamespace(record_event=lambda: 1)
        engine = SimpleNamespace(run=lambda job: job(SimpleNamespace(executor=executor)))
        worker: Any = SimpleNamespace(engine=engine, endpoints=list(map(endpoint, of_ranks)))
        sent: Any = None
        return Worker.digest(worker, [[1]], sent)

    expected = digest({0: ["a", "k"], 1: ["b", "k"]})
    assert expected.count("-") == 1, "two plane groups"
    assert digest({0: ["a", "k"], 1: ["b", "k"]}, {1: [copy, "k"]}) == expected
    assert digest({0: ["a", "k"]}, {1: ["b", "k"]}, {1: [copy, "k"]}) == expected
    assert digest({0: ["a", "k"]}, {1: ["c", "k"]}) != expected
