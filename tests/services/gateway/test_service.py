"""The gateway process: settings errors, start and shutdown."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import SettingsError
from services.gateway import service
from services.gateway.service import serve
from services.gateway.settings import GatewaySettings
from tests.ports import free_ports

pytestmark = pytest.mark.slow


async def test_serves_both_ports_until_sigterm() -> None:
    port, grpc_port, health_port, router = free_ports(4)
    settings = GatewaySettings.model_validate(
        {
            "port": port,
            "grpc_port": grpc_port,
            "health_port": health_port,
            "routers": [f"http://127.0.0.1:{router}"],
            "queue_wait_s": 0,
        }
    )
    serving = asyncio.create_task(serve(settings))
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
        aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):
        async with asyncio.timeout(20):
            await channel.channel_ready()
        assert (await http.get("/health")).status_code == 200
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no router answers")
        for path in ("/health", "/ready"):
            probed = await http.get(f"http://127.0.0.1:{health_port}{path}")
            same = await http.get(path)
            assert (probed.status_code, probed.json()) == (same.status_code, same.json())
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        await serving
    for closed in (port, grpc_port, health_port):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", closed)


async def test_failed_check_of_readiness_is_not_ready_and_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_HEALTH_PERIOD_S", 0.001)
    gateway = Mock()
    gateway.not_ready = AsyncMock(side_effect=[None, RuntimeError("broken"), *[None] * 1000])
    rpc = Mock(set_serving=AsyncMock())
    updating = asyncio.create_task(service._update_health(gateway, rpc))
    async with asyncio.timeout(10):
        while rpc.set_serving.await_count < 3:  # noqa: ASYNC110 - the mock has no event
            await asyncio.sleep(0.001)
    updating.cancel()
    assert [call.args[0] for call in rpc.set_serving.await_args_list[:3]] == [True, False, True]


async def test_metrics_with_a_port_of_their_own_need_the_cluster_token() -> None:
    port, metrics_port = free_ports(2)
    settings = GatewaySettings.model_validate(
        {"port": port, "grpc_port": 0, "metrics_port": metrics_port, "cluster_token": "between-us"}
    )
    serving = asyncio.create_task(serve(settings))
    url = f"http://127.0.0.1:{metrics_port}/metrics"
    right = {"authorization": "Bearer between-us"}
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                assert (await http.get(f"http://127.0.0.1:{port}/metrics")).status_code == 404
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
        assert (await http.get(url)).status_code == 401
        assert "headrace_requests_total" in (await http.get(url, headers=right)).text
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        await serving
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", metrics_port)


@pytest.mark.parametrize("name", ["port", "grpc_port", "metrics_port", "health_port"])
async def test_port_in_use_is_a_settings_error(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = GatewaySettings.model_validate({"port": 0, "grpc_port": 0, name: port})
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(settings)


async def test_unknown_model_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="known names"):
        await serve(GatewaySettings.model_validate({"model": "nothing"}))


def test_service_does_not_import_torch() -> None:
    code = (
        "import sys, services.gateway.service; print(sorted({'torch','triton'} & {*sys.modules}))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert output.stdout.strip() == b"[]"
