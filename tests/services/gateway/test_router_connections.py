"""A burst of calls to a router: its connections are opened a few at a time, and none is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

from services.common.errors import Overloaded, ServiceError
from services.common.placement import Placement, PlaceRequest, Role
from services.gateway import router_connections
from services.gateway.router_answers import NoRouter
from services.gateway.router_client import RoutedPlacement, RouterClient
from tests.services.certificates import Authority
from tests.services.router.app import JSON
from tests.services.router.samples import beat, registration
from tests.services.tls_ports import router_port

REQUEST = PlaceRequest(request_id="r", model="small", prompt_tokens=1, max_tokens=1, wait_s=60.0)
OPENING = 3
CALLS = 8


class SilentServer:
    """Accepts connections and never answers, so that TLS clients do not finish opening them."""

    def __init__(self) -> None:
        self.accepted = self.open = self.most_open = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await reader.read()
        self.open -= 1
        writer.close()

    @asynccontextmanager
    async def port(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]


async def test_each_connection_has_the_whole_timeout_and_unsent_calls_are_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_connections, "MAX_OPENING", OPENING)
    server, tls = SilentServer(), Authority(tmp_path).tls("gateway")
    async with server.port() as port:
        client = RouterClient([f"https://127.0.0.1:{port}"], token=None, timeout_s=0.1, tls=tls)
        calls = [client.place(REQUEST) for _ in range(CALLS)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        await client.close()
    assert {type(result) for result in results} == {NoRouter}
    assert server.accepted == CALLS, "calls wait for their connection, and are not released"
    assert server.most_open <= OPENING


@pytest.mark.slow
async def test_burst_beyond_the_queue_of_a_router_is_refused_and_the_rest_is_placed() -> None:
    calls, max_waiting = 400, 100
    async with router_port(settings={"max_waiting": f"{max_waiting}"}) as port:
        url = f"http://127.0.0.1:{port}"
        client = RouterClient([url], token=None, timeout_s=30.0)
        async with httpx.AsyncClient(base_url=url, trust_env=False, headers=JSON) as worker:
            await _post(worker, "register", registration("c0", Role.COLOCATED, max_running=1000))
            await _post(worker, "heartbeat", beat("c0", pages_free=0))
            answers: asyncio.Queue[Placement | ServiceError] = asyncio.Queue()
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for _ in range(calls):
                    group.create_task(_place(client, answers))
                refused = [await answers.get() for _ in range(calls - max_waiting)]
                await _post(worker, "heartbeat", beat("c0"))
        placed = [answers.get_nowait() for _ in range(max_waiting)]
        await client.close()
    assert {type(refusal) for refusal in refused} == {Overloaded}
    assert all(isinstance(answer, Placement) for answer in placed)


async def _place(client: RouterClient, answers: "asyncio.Queue[Placement | ServiceError]") -> None:
    try:
        routed: RoutedPlacement = await client.place(REQUEST)
    except ServiceError as error:
        answers.put_nowait(error)
    else:
        with routed:
            answers.put_nowait(routed.placement)


async def _post(worker: httpx.AsyncClient, call: str, body: BaseModel) -> None:
    (await worker.post(f"/v1/{call}", content=body.model_dump_json())).raise_for_status()
