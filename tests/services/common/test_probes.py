"""``/health`` and ``/ready`` on the metrics port and on a port of their own."""

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from unittest.mock import Mock

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.common import metrics_server, probes
from services.common.errors import SettingsError
from services.common.metrics_server import OperationServers
from services.common.probes import Probes
from services.common.settings import ServiceSettings
from tests.services.certificates import Authority

OK = (200, {"status": "ok"})
READY = (200, {"status": "ready"})


class State:
    """Reasons that the checks return."""

    failure: str | None = None
    not_ready: str | None = None

    async def check_failure(self) -> str | None:
        return self.failure

    async def check_readiness(self) -> str | None:
        return self.not_ready


@asynccontextmanager
async def operation(state: State, **settings: object) -> AsyncIterator[dict[str, int]]:
    """Start both servers on free ports; yield the ports."""
    servers = OperationServers.start(
        ServiceSettings.model_validate({"health_port": 0, **settings}),
        Probes(state.check_readiness, state.check_failure),
        CollectorRegistry(),
        0,
    )
    try:
        yield servers.ports
    finally:
        await asyncio.to_thread(servers.stop)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


async def fetch(port: int, path: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        return await http.request(method, f"http://127.0.0.1:{port}{path}")


async def answer(port: int, path: str) -> tuple[int, dict[str, str]]:
    response = await fetch(port, path)
    return response.status_code, response.json()


@pytest.mark.parametrize("port", ["metrics_port", "health_port"])
async def test_both_ports_report_the_state_without_the_cluster_token(port: str) -> None:
    state = State()
    async with operation(state, cluster_token="between-us") as ports:
        assert await answer(ports[port], "/health") == OK
        assert await answer(ports[port], "/ready") == READY
        state.not_ready = "not registered"
        assert await answer(ports[port], "/health") == OK
        refused = await fetch(ports[port], "/ready")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json() == {"status": "not ready", "reason": "not registered"}
        assert refused.headers["content-type"] == "application/json"
        state.failure = "the engine stopped"
        body = {"status": "failed", "reason": "the engine stopped"}
        assert await answer(ports[port], "/health") == (503, body)


async def test_health_port_serves_probes_alone() -> None:
    async with operation(State()) as ports:
        port = ports["health_port"]
        assert (await fetch(ports["metrics_port"], "/metrics")).status_code == 200
        for path in ("/metrics", "/", "/ready/", "/v1/models"):
            assert (await fetch(port, path)).status_code == 404
        head = await fetch(port, "/ready", "HEAD")
        assert (head.status_code, head.content) == (200, b"")
        refused = await fetch(port, "/health", "POST")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


async def test_health_port_needs_no_certificate_under_mutual_tls(authority: Authority) -> None:
    files = authority.issue("worker")
    tls = {"tls_cert_file": files.certificate, "tls_key_file": files.key, "tls_ca_file": files.ca}
    async with operation(State(), **tls) as ports:
        assert await answer(ports["health_port"], "/ready") == READY
        with pytest.raises(httpx.TransportError):
            await fetch(ports["metrics_port"], "/ready")
        context = authority.tls("client").client_context
        async with httpx.AsyncClient(trust_env=False, verify=context) as http:
            response = await http.get(f"https://127.0.0.1:{ports['metrics_port']}/ready")
        assert (response.status_code, response.json()) == READY


async def test_blocked_event_loop_fails_both_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    checks = Probes(state.check_readiness, state.check_failure)
    with monkeypatch.context() as patch:
        patch.setattr(probes, "ANSWER_S", 0.05)
        with ThreadPoolExecutor() as threads:  # its end blocks the loop until both have answered
            asking = [threads.submit(checks.answer, path) for path in probes.PATHS]
    for status, body in (answer.result() for answer in asking):
        assert status == 503
        assert body["reason"] == "the event loop has not answered for 0.05 s"
    assert await asyncio.to_thread(checks.answer, "/health") == OK


def test_closed_event_loop_is_not_ready() -> None:
    async def create() -> Probes:
        state = State()
        return Probes(state.check_readiness)

    checks = asyncio.run(create())
    assert checks.answer("/ready") == (503, {"status": "not ready", "reason": "stopping"})


async def test_further_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_MAX_CONNECTIONS", 2)
    async with operation(State()) as ports:
        port = ports["health_port"]
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        with pytest.raises(httpx.TransportError):
            await fetch(port, "/health")
        for _, writer in idle:
            writer.close()
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await answer(port, "/health") == OK
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("secured", [False, True])
async def test_connection_of_a_slow_client_is_closed(
    secured: bool, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte arrives within the timeout of a read, but the request never ends."""
    monkeypatch.setattr(metrics_server, "_DEADLINE_S", 0.3)
    files = authority.issue("worker")
    tls = {"tls_cert_file": files.certificate, "tls_key_file": files.key, "tls_ca_file": files.ca}
    async with operation(State(), **(tls if secured else {})) as ports:
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["metrics_port"])
        # The header of a TLS record that announces more bytes than follow, or a request line.
        writer.write(b"\x16\x03\x01\x40\x00" if secured else b"GET /health HTTP/1.1\r\nX: ")

        async def trickle() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                await reader.read()
        trickling.cancel()
        writer.close()


async def test_connection_without_a_thread_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_MAX_CONNECTIONS", 1)
    no_thread = Mock(side_effect=RuntimeError("can't start new thread"))
    async with operation(State()) as ports:
        with monkeypatch.context() as exhausted:
            exhausted.setattr(ThreadingMixIn, "process_request", no_thread)
            with pytest.raises(httpx.TransportError):
                await fetch(ports["health_port"], "/health")
        assert await answer(ports["health_port"], "/health") == OK
    no_thread.assert_called_once()


async def test_used_metrics_port_closes_the_health_port() -> None:
    state = State()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        port, health_port = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        settings = ServiceSettings.model_validate({"health_port": health_port})
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port} for metrics"):
            OperationServers.start(
                settings, Probes(state.check_readiness), CollectorRegistry(), port
            )
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", health_port)


async def test_used_health_port_is_a_settings_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServiceSettings.model_validate({"health_port": taken.getsockname()[1]})
        with pytest.raises(SettingsError, match="for probes"):
            OperationServers.start(settings, Probes(State().check_readiness))
