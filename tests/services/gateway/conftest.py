"""Fixtures: a complete gateway with a fake router and fake workers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from grpc import aio

from services.gateway.gateway import Gateway
from services.gateway.http.routes import build_app
from services.gateway.http.server import http_config, listen_for_clients
from services.gateway.keys import ApiKeys
from services.gateway.router_client import RouterClient
from services.gateway.rpc import build_rpc_server
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from tests.services.gateway.fakes import FakeRouter, FakeWorker, running

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="session")
def model() -> ServedModel:
    return ServedModel.load(GatewaySettings.model_validate({"model": "smollm2-135m"}))


@dataclass
class Site:
    """A running gateway with its fake router and workers, and with clients."""

    gateway: Gateway
    router: FakeRouter
    workers: list[FakeWorker]
    http: httpx.AsyncClient
    url: str
    rpc: aio.Channel
    model: ServedModel

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text)

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


OpenSite = Callable[..., Any]


@pytest.fixture
async def open_site(model: ServedModel) -> AsyncIterator[OpenSite]:
    async with AsyncExitStack() as stack:

        async def open_(*, workers: int = 1, keys: ApiKeys | None = None, **settings: Any) -> Site:
            return await stack.enter_async_context(gateway_site(model, workers, keys, settings))

        yield open_


@pytest.fixture
async def site(open_site: OpenSite) -> Site:
    opened: Site = await open_site()
    return opened


@asynccontextmanager
async def gateway_site(
    model: ServedModel, count: int, keys: ApiKeys | None, changes: dict[str, Any]
) -> AsyncIterator[Site]:
    """Run a gateway with fake workers. ``changes``: settings that differ from the defaults."""
    settings = GatewaySettings.model_validate(
        {"deadline_s": 20.0, "ping_timeout_s": 20.0, "cluster_token": "between-us", **changes}
    )
    workers = [FakeWorker(f"decode-{i}") for i in range(count)]
    router = FakeRouter(workers, model.name)
    async with running(router, *workers):
        client = RouterClient([router.url], token=settings.token, timeout_s=2)
        gateway = Gateway(settings, model, keys or ApiKeys(), client)
        gateway.limits.update(router.readiness)
        rpc = build_rpc_server(gateway, "127.0.0.1:0")
        listener = listen_for_clients("127.0.0.1", 0, write_timeout_s=settings.write_timeout_s)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(http_config(build_app(gateway), gateway))
        await rpc.start()
        serving = asyncio.create_task(server._serve([listener]))
        async with (
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, headers=JSON) as http,
            aio.insecure_channel(f"127.0.0.1:{rpc.port}") as channel,
        ):
            yield Site(gateway, router, workers, http, url, channel, model)
        server.should_exit = True
        await rpc.stop(0)
        await serving
        await gateway.close()
