"""The router process: settings errors, limits of connections, shutdown."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.common.errors import SettingsError
from services.common.placement import Role
from services.common.router_errors import ErrorCode, RouterError
from services.router.server import MAX_HEAD_BYTES
from services.router.service import serve
from services.router.settings import RouterSettings
from tests.ports import free_port
from tests.services.router.app import JSON
from tests.services.router.samples import beat, place_request, registration

CHUNKED = b"POST /v1/place HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Run a router and stop it with SIGTERM. Yield a client and the port."""
    port = free_port()
    task = asyncio.create_task(serve(RouterSettings.model_validate({"port": port, **settings})))
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, headers=JSON) as http:
        await asyncio.sleep(0)
        yield http, port
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await task
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def queue_calls(http: httpx.AsyncClient, count: int) -> list[asyncio.Task[httpx.Response]]:
    """Register a full worker and send placement requests, until all of them are queued."""
    full = beat("c0", pages_free=0)
    for path, body in (("register", registration("c0", Role.COLOCATED)), ("heartbeat", full)):
        await http.post(f"/v1/{path}", content=body.model_dump_json())
    calls = [
        asyncio.create_task(
            http.post("/v1/place", content=place_request(wait_s=30).model_dump_json())
        )
        for _ in range(count)
    ]
    await until_metric(http, f"headrace_router_requests_waiting {count}.0")
    return calls


async def until_metric(http: httpx.AsyncClient, line: str) -> None:
    async with asyncio.timeout(30):
        while line not in (await http.get("/metrics")).text:  # noqa: ASYNC110 - polls a server
            await asyncio.sleep(0.01)


async def test_sigterm_refuses_queued_calls() -> None:
    async with serving() as (http, _):
        queued = await queue_calls(http, 3)
    for response in await asyncio.gather(*queued):
        assert response.status_code == 503
        assert RouterError.model_validate_json(response.content).error.code is ErrorCode.CLOSING


async def test_disconnected_caller_is_removed_from_the_queue() -> None:
    async with serving() as (http, _):
        (queued,) = await queue_calls(http, 1)
        queued.cancel()
        await until_metric(http, 'headrace_router_placements_total{outcome="abandoned"} 1.0')


async def test_sigterm_closes_idle_connections() -> None:
    async with serving() as (http, port):
        assert (await http.get("/ready")).status_code == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await http.get("/ready")
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /" + b"a" * MAX_HEAD_BYTES],
        [b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"a" * MAX_HEAD_BYTES],
        [CHUNKED, b"0\r\na: " + b"a" * MAX_HEAD_BYTES],
    ],
    ids=["target", "header", "trailer"],
)
async def test_request_head_is_limited(parts: list[bytes]) -> None:
    async with serving() as (http, port):
        await http.get("/ready")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(30):
            assert b"HTTP/1.1 400 Bad Request\r\n" in await reader.read()
        writer.close()


async def test_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.server.KEEP_ALIVE_S", 1.0)
    async with serving() as (http, port):
        await http.get("/ready")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_health_port_serves_the_answers_of_the_main_port() -> None:
    """Neither needs the token. SIGTERM closes the health port."""
    health_port = free_port()
    async with serving(health_port=health_port, cluster_token="between-us") as (http, _):
        for path, status in (("/health", "ok"), ("/ready", "ready")):
            for answer in (
                await http.get(path),
                await http.get(f"http://127.0.0.1:{health_port}{path}"),
            ):
                assert (answer.status_code, answer.json()) == (200, {"status": status})
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", health_port)


@pytest.mark.parametrize("name", ["port", "health_port"])
async def test_port_in_use_is_a_settings_error(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(RouterSettings.model_validate({"port": 0, name: port}))
