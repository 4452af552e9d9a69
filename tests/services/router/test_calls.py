"""Calls on the router's HTTP API: bodies, callers that disconnect, many queued calls."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from services.common.http_server import HttpServer, listen
from services.common.placement import Role
from services.common.router_errors import ErrorCode
from services.router import calls
from services.router.app import build_dispatcher, create_app
from services.router.dispatcher import Dispatcher
from services.router.server import http_config
from services.router.settings import RouterSettings
from tests.services.router.app import HEADERS, Router, code_of, until
from tests.services.router.samples import beat, place_request, registration

QUEUED = 400
ANSWERED = 'requests_total{endpoint="/v1/place"'
POST = b"POST /v1/place HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


class Served:
    """A router with a socket and one colocated worker."""

    def __init__(self, port: int, dispatcher: Dispatcher) -> None:
        self.port = port
        self.dispatcher = dispatcher
        now = asyncio.get_running_loop().time()
        dispatcher.register(registration("c0", Role.COLOCATED), now)

    def beat(self, pages_free: int) -> None:
        now = asyncio.get_running_loop().time()
        self.dispatcher.heartbeat(beat("c0", pages_free=pages_free), now)

    async def open(self, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send bytes on a new connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.01 if len(parts) > 1 else 0)
        return reader, writer

    async def until_waiting(self, count: int) -> None:
        await until(lambda: len(self.dispatcher.queue) == count)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    settings = RouterSettings.model_validate(
        {"suspect_after_s": 300, "gone_after_s": 600, "shed_after_s": 3600, "max_body_bytes": 4096}
    )
    dispatcher = build_dispatcher(settings, now=-math.inf)
    listener = listen("127.0.0.1", 0)
    app = create_app(settings, dispatcher, clock=asyncio.get_running_loop().time)
    server = HttpServer(http_config(app))
    serving = asyncio.create_task(server.serve([listener]))
    yield Served(listener.getsockname()[1], dispatcher)
    server.should_exit = True
    await serving


def place_body() -> bytes:
    """Return the body of a call with a new placement id."""
    return place_request(wait_s=60).model_dump_json().encode()


def place_call() -> bytes:
    body = place_body()
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(30):
        return int((await reader.readline()).split()[1])


async def test_queued_calls_leave_the_queue_when_their_callers_disconnect(served: Served) -> None:
    served.beat(pages_free=0)
    connections = [await served.open(place_call()) for _ in range(QUEUED)]
    await served.until_waiting(QUEUED)
    for _, writer in connections[::2]:
        writer.close()
    await served.until_waiting(QUEUED // 2)
    served.dispatcher.close()
    for reader, writer in connections[1::2]:
        assert await status_of(reader) == 503
        writer.close()


async def test_queued_calls_are_answered_when_their_worker_has_capacity(served: Served) -> None:
    served.beat(pages_free=0)
    connections = [await served.open(place_call()) for _ in range(5)]
    await served.until_waiting(5)
    served.beat(pages_free=64)
    for reader, writer in connections:
        assert await status_of(reader) == 200
        writer.close()


async def test_body_may_arrive_in_parts(served: Served) -> None:
    served.beat(pages_free=64)
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n"
    one, other = place_body(), place_body()
    for parts in (
        [POST + b"content-length: %d\r\n\r\n" % len(one), one[:20], one[20:]],
        [chunked, *(b"%x\r\n%b\r\n" % (len(part), part) for part in (other[:20], other[20:], b""))],
    ):
        reader, writer = await served.open(*parts)
        assert await status_of(reader) == 200
        writer.close()


async def test_chunked_body_that_is_too_long_is_413(served: Served) -> None:
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    reader, writer = await served.open(POST + b"transfer-encoding: chunked\r\n\r\n", chunk, chunk)
    assert await status_of(reader) == 413
    writer.close()


async def test_body_that_does_not_end_is_408(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "BODY_TIMEOUT_S", 0.05)
    reader, writer = await served.open(POST + b"content-length: 9\r\n\r\n{")
    assert await status_of(reader) == 408
    writer.close()


async def test_caller_that_disconnects_before_the_end_of_its_body_is_not_answered(
    router: Router,
) -> None:
    await router.join("c0", Role.COLOCATED)
    async with router.client.request("/v1/place", method="POST", headers=HEADERS) as connection:
        await connection.send(place_body())
        await connection.disconnect()
    assert router.dispatcher.fleet.idle
    assert ANSWERED not in await metrics_of(router)


async def test_caller_that_disconnects_while_it_is_answered_gets_no_placement(
    router: Router,
) -> None:
    await router.join("c0", Role.COLOCATED, pages_free=0)
    async with router.client.request("/v1/place", method="POST", headers=HEADERS) as connection:
        await connection.send(place_body())
        await connection.send_complete()
        await router.until_waiting(1)
        router.dispatcher.heartbeat(beat("c0", pages_free=64), router.clock())
        assert not len(router.dispatcher.queue), "the call is answered"
        await connection.disconnect()
    assert router.dispatcher.fleet.idle
    assert ANSWERED not in await metrics_of(router)
    assert 'outcome="abandoned"} 1.0' in await metrics_of(router)


@pytest.mark.parametrize("declared", ["Application/JSON", "application/json; charset=utf-8"])
async def test_content_type_may_have_other_case_and_parameters(
    router: Router, declared: str
) -> None:
    headers = {**HEADERS, "Content-Type": declared}
    status, body, _ = await router.post("/v1/place", place_request(), headers)
    assert (status, code_of(body)) == (503, ErrorCode.NO_WORKERS)


async def test_refused_calls_are_counted_by_path_and_status(router: Router) -> None:
    await router.post("/v1/place", b"{}", {})
    await router.post("/v1/release", b"{}")
    await router.client.get("/v1/heartbeat", headers=HEADERS)
    text = await metrics_of(router)
    for path, status in (("place", 401), ("release", 400), ("heartbeat", 405)):
        assert f'requests_total{{endpoint="/v1/{path}",status="{status}"}} 1.0' in text


async def metrics_of(router: Router) -> str:
    text: str = await (await router.client.get("/metrics", headers=HEADERS)).get_data(as_text=True)
    return text
