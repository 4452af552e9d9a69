"""Disconnects, deadlines, drain and slow readers."""

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import pytest

from headrace.v1 import decode_pb2, error_pb2
from services.common.errors import Unavailable
from services.gateway.http.middleware import RequestMiddleware
from services.gateway.metrics import GatewayMetrics
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import completion, failing, outcomes
from tests.services.gateway.fakes import (
    FakeStream,
    hang,
    say,
    until,
)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_disconnect_cancels_the_stream_and_releases_the_placement(
    site: Site, stream: bool, tokens_before: int
) -> None:
    async def script(down: FakeStream) -> None:
        if tokens_before:
            await down.tokens(*[5] * tokens_before)
        await down.cancelled.wait()

    site.worker.script = script
    asking = asyncio.create_task(completion(site, stream=stream))
    await site.router.started(1)
    await asyncio.sleep(0.05)
    asking.cancel()
    async with asyncio.timeout(30):
        await site.worker.streams[0].cancelled.wait()
    await site.router.settled()
    assert outcomes(site) == [("cancelled", None)]
    labels = {"endpoint": "/v1/completions", "status": "499"}
    await until(lambda: site.metric("headrace_requests_total", **labels) == 1)
    assert site.metric("headrace_gateway_requests_running") == 0


async def test_disconnect_while_queued_cancels_the_place_call(site: Site) -> None:
    site.router.hold = True
    asking = asyncio.create_task(completion(site))
    await until(lambda: bool(site.router.headers))  # the router has received the placement request
    asking.cancel()
    await until(lambda: site.router.abandoned == 1)
    await until(lambda: site.metric("headrace_gateway_requests_running") == 0)
    assert site.router.places == []


async def test_unexpected_error_is_500(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.gateway, "not_ready", None)
    response = await site.http.get("/ready")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"]


async def test_failure_of_one_prompt_cancels_the_others(site: Site) -> None:
    site.worker.queued = [hang, failing(error_pb2.ERROR_CODE_INVALID), hang]
    response = await completion(site, prompt=[[1], [2], [3]])
    assert response.status_code == 400
    async with asyncio.timeout(30):
        await site.worker.streams[0].cancelled.wait()
        await site.worker.streams[2].cancelled.wait()
    await site.router.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_deadline_cancels_the_stream(open_site: OpenSite, stream: bool) -> None:
    site: Site = await open_site(deadline_s=2.0)
    response = await completion(site, stream=stream)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert 0 < site.worker.streams[0].start.deadline_s <= 2.0
    async with asyncio.timeout(30):
        await site.worker.streams[0].cancelled.wait()
    await site.router.settled()


async def test_restarted_worker_gets_a_new_session(site: Site) -> None:
    site.worker.script = say(5)
    assert (await completion(site)).status_code == 200
    site.worker.script = hang
    held = asyncio.create_task(completion(site))
    await site.router.started(2)
    site.worker.epoch = "another-life"
    site.worker.script = say(5)
    assert (await completion(site)).status_code == 200
    assert (await held).status_code == 200  # the old session ended, and its request was retried
    assert site.worker.streams[-1].start.epoch == "another-life"
    assert len(site.worker.metadata) == 2


async def test_placement_on_an_ended_epoch_does_not_end_the_live_session(site: Site) -> None:
    """A second router has not noticed that the worker restarted."""
    release = asyncio.Event()

    async def say_slowly(stream: FakeStream) -> None:
        await stream.tokens(5)
        await release.wait()
        await say(5, 6)(stream)

    site.worker.script = say_slowly
    held = asyncio.create_task(completion(site))
    await site.router.started(1)
    await until(lambda: site.metric("headrace_generation_tokens_total") > 0)
    current, site.worker.epoch = site.worker.epoch, "ended-epoch"

    async def refuse(stream: FakeStream) -> None:
        site.worker.epoch = current  # the next placement comes from the first router
        message = "this worker has restarted"
        await stream.fail(error_pb2.ERROR_CODE_INCOMPATIBLE, message, site.worker.worker_id)

    site.worker.queued = [refuse]
    site.worker.script = say(5)
    assert (await completion(site)).status_code == 200
    release.set()
    assert (await held).status_code == 200
    assert [stream.start.request.attempt for stream in site.worker.streams] == [0, 0, 1]
    assert [s.start.epoch for s in site.worker.streams] == [current, "ended-epoch", current]
    assert len(site.worker.metadata) == 2, "the live session was used again"
    assert len(site.gateway._sessions._sessions) == 1
    await site.router.settled()


async def test_stream_of_a_slow_reader_fails(open_site: OpenSite) -> None:
    site: Site = await open_site(stream_buffer_tokens=64)

    async def flood(stream: FakeStream) -> None:
        step = decode_pb2.DecodeStep()
        for first in (0, 65):  # the reader gets no chance to run between two deltas of one step
            delta = step.deltas.add(stream=stream.start.stream)
            for index in range(first, first + 65):
                delta.tokens.add(index=index, token=5)
        await stream.send_bytes(step.SerializeToString())
        await stream.cancelled.wait()

    site.worker.script = flood
    response = await completion(site, max_tokens=200)
    assert response.status_code == 503
    assert "slowly" in response.json()["error"]["message"]
    await site.router.settled()


async def test_draining_refuses_new_requests_and_finishes_running_ones(open_site: OpenSite) -> None:
    site: Site = await open_site()
    release = asyncio.Event()

    async def script(stream: FakeStream) -> None:
        await stream.tokens(5)
        await release.wait()
        await stream.end()

    site.worker.script = script
    running = asyncio.create_task(completion(site))
    await site.router.started(1)
    draining = asyncio.create_task(site.gateway.drain(30))
    await asyncio.sleep(0.01)
    refused = await completion(site)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    ready = await site.http.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
    assert (await site.http.get("/health")).status_code == 200
    assert not draining.done()
    assert site.gateway.running == 1
    release.set()
    assert (await running).status_code == 200
    await draining
    assert site.gateway.running == 0


async def test_drain_waits_for_a_request_whose_body_arrives_slowly(site: Site) -> None:
    release = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": "a", '
        await release.wait()
        yield b'"max_tokens": 2}'

    site.worker.script = say(5, 6)
    headers = {"content-type": "application/json"}
    sending = asyncio.create_task(
        site.http.post("/v1/completions", content=body(), headers=headers)
    )
    await until(lambda: site.gateway._open_calls == 1)
    await asyncio.sleep(0.05)  # it is accepted
    draining = asyncio.create_task(site.gateway.drain(30))
    await asyncio.sleep(0.05)
    assert not draining.done()
    release.set()
    assert (await sending).status_code == 200
    await draining


async def test_requests_that_outlast_the_drain_fail(site: Site) -> None:
    running = asyncio.create_task(completion(site))
    await site.router.started(1)
    await site.gateway.drain(0.05)
    assert (await running).status_code == 503
    await site.router.settled()


async def test_requests_without_a_worker_fail_at_the_end_of_the_drain(site: Site) -> None:
    site.router.hold = True
    waiting = asyncio.create_task(completion(site))
    await until(lambda: bool(site.router.headers))  # the router has received the placement request
    await site.gateway.drain(0.05)
    answer = await waiting
    assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (503, True)
    assert "shutting down" in answer.json()["error"]["message"]
    await until(lambda: site.router.abandoned == 1)


async def test_failed_attempts_are_not_repeated_after_the_drain(site: Site) -> None:
    async def fail_late(stream: FakeStream) -> None:
        await stream.tokens(5)
        await asyncio.sleep(0.2)
        await failing(error_pb2.ERROR_CODE_DRAINING)(stream)

    site.worker.script = fail_late
    running = asyncio.create_task(completion(site))
    await site.router.started(1)
    site.gateway._placer.stop(Unavailable("the gateway is shutting down"))
    assert (await running).status_code == 503
    assert len(site.router.places) == 1
    await site.router.settled()


async def test_request_that_the_server_cancels_is_counted() -> None:
    metrics = GatewayMetrics()

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    middleware = RequestMiddleware(cancelled, metrics.requests)
    scope = {"type": "http", "method": "POST", "path": "/", "scheme": "http", "headers": []}
    with pytest.raises(asyncio.CancelledError):
        await middleware(scope, AsyncMock(), AsyncMock())
    labels = {"endpoint": "unknown", "status": "500"}
    assert metrics.registry.get_sample_value("headrace_requests_total", labels) == 1
