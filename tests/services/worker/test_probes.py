"""``/health`` and ``/ready`` of a worker: the engine's progress, registration and draining."""

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import PropertyMock

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from runtime.engine import Engine
from services.common.grpc_server import GrpcServer, open_channel
from services.common.placement import Role
from services.decode.settings import DecodeSettings
from services.worker import lifecycle
from services.worker.stream_service import SERVICE
from tests.services.workers import LIMIT_S, Decode, Site, until

UNUSED = "http://127.0.0.1:1"


class Live:
    """A decode worker that runs `lifecycle.live`, with clients of its probes."""

    def __init__(self, decode: Decode, http: httpx.AsyncClient, port: int) -> None:
        self.worker = decode.worker
        self.agent = decode.agent
        self._http = http
        self._port = port

    async def get(self, path: str) -> tuple[int, dict[str, str]]:
        response = await self._http.get(path)
        return response.status_code, response.json()

    async def reason(self, path: str) -> str | None:
        """Return the reason of a probe that fails, else None."""
        status, body = await self.get(path)
        assert (status == 503) == ("reason" in body)
        return body.get("reason")

    async def serves(self) -> bool:
        """Return the state of ``grpc.health.v1``."""
        async with open_channel(f"127.0.0.1:{self._port}") as channel:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until_agreed(self, *, ready: bool) -> None:
        """Wait until gRPC and HTTP report this readiness."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                reported = {await self.serves(), await self.reason("/ready") is None}
                if reported == {ready}:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def live(site: Site, stop: asyncio.Event, **settings: object) -> AsyncIterator[Live]:
    """Run a worker, and drain it at the end unless it has failed."""
    decode = await site.decode(started=False)
    server = GrpcServer("127.0.0.1:0", [SERVICE])
    values = {"heartbeat_s": 0.01, "drain_s": 0.2, "health_port": 0, **settings}
    with capture_logs() as logs:
        living = asyncio.create_task(
            lifecycle.run_worker(
                decode.worker, server, DecodeSettings.model_validate(values), Role.DECODE
            )
        )
        await until(lambda: any(record["event"] == "ready" for record in logs))
    (record,) = (record for record in logs if record["event"] == "ready")
    url = f"http://127.0.0.1:{record['health_port']}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=LIMIT_S) as http:
        yield Live(decode, http, server.port)
    stop.set()
    await asyncio.wait_for(living, LIMIT_S)


async def test_ready_reports_the_state_of_grpc_health(
    site: Site, stop: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live(site, stop) as worker:
        assert await worker.get("/health") == (200, {"status": "ok"})
        assert await worker.get("/ready") == (200, {"status": "ready"})
        assert await worker.serves()
        blocked = PropertyMock(return_value="no landing slot is free")
        monkeypatch.setattr(type(worker.worker), "not_ready", blocked)
        await worker.until_agreed(ready=False)
        assert await worker.reason("/ready") == "no landing slot is free"
        assert await worker.reason("/health") is None


async def test_worker_is_not_ready_before_it_has_registered(
    site: Site, stop: asyncio.Event
) -> None:
    """A router that never answers, as in a network that drops packets."""
    with socket.create_server(("127.0.0.1", 0)) as router:
        url = f"http://127.0.0.1:{router.getsockname()[1]}"
        async with live(site, stop, routers=[url]) as worker:
            reason = await worker.reason("/ready")
            assert (reason or "").startswith(f"not registered: {url}")
            assert not await worker.serves()


async def test_worker_that_cannot_register_is_not_ready(site: Site, stop: asyncio.Event) -> None:
    async with live(site, stop, routers=[UNUSED]) as worker:
        await worker.until_agreed(ready=False)
        assert (await worker.reason("/ready") or "").startswith(f"not registered: {UNUSED}: ")
        assert await worker.reason("/health") is None


async def test_draining_worker_is_healthy_and_not_ready(
    site: Site, stop: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live(site, stop, drain_s=LIMIT_S) as worker:
        with monkeypatch.context() as busy:
            busy.setattr(type(worker.worker), "idle", False)
            stop.set()
            await until(lambda: worker.worker.draining)
            assert await worker.reason("/ready") == "draining"
            assert await worker.reason("/health") is None
            await worker.until_agreed(ready=False)


async def test_step_that_does_not_end_fails_the_liveness(site: Site, stop: asyncio.Event) -> None:
    release = threading.Event()

    def hang(_: Engine) -> None:
        release.wait(LIMIT_S)

    async with live(site, stop, stall_s=0.1) as worker:
        await asyncio.sleep(0.15)  # an idle engine does not fail
        assert await worker.reason("/health") is None
        hanging = worker.worker.engine.run(hang)
        async with asyncio.timeout(LIMIT_S):
            while (reason := await worker.reason("/health")) is None:  # noqa: ASYNC110 - polls
                await asyncio.sleep(0.01)
        assert re.fullmatch(r"the engine thread has made no progress in its step for \d+ s", reason)
        release.set()
        await hanging
        await asyncio.sleep(0.15)
        assert await worker.reason("/health") is None


async def test_transfer_thread_that_hangs_fails_the_liveness(
    site: Site, stop: asyncio.Event
) -> None:
    release = threading.Event()
    async with live(site, stop, stall_s=0.1) as worker:
        await asyncio.sleep(0.15)  # an idle thread does not fail
        assert await worker.reason("/health") is None
        hanging = worker.agent.run_on_codec_stream(lambda: release.wait(LIMIT_S))
        async with asyncio.timeout(LIMIT_S):
            while (reason := await worker.reason("/health")) is None:  # noqa: ASYNC110 - polls
                await asyncio.sleep(0.01)
        assert re.fullmatch(
            r"the transfer thread has made no progress in its step for \d+ s", reason
        )
        release.set()
        await asyncio.wrap_future(hanging)
        async with asyncio.timeout(LIMIT_S):
            while await worker.reason("/health"):  # noqa: ASYNC110 - polls
                await asyncio.sleep(0.01)
