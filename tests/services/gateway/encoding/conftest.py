"""Fixtures: a gateway with an encoder, a real router and real encoder workers of tiny models."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from grpc import aio

from headrace.v1 import encode_pb2_grpc
from services.common.grpc_server import GrpcServer
from services.encoder.loading import LoadedEncoder, load_worker
from services.encoder.service import SERVICE, EncoderServicer, EncoderWorker
from services.encoder.settings import EncoderSettings
from services.gateway.encoding.models import ServedEncoder
from services.gateway.gateway import Gateway
from services.gateway.http.routes import build_app
from services.gateway.http.server import http_config, listen_for_clients
from services.gateway.keys import ApiKeys
from services.gateway.rpc import build_rpc_server
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.router.app import build_encoder_dispatcher
from services.router.encoders.dispatcher import EncoderDispatcher
from services.router.settings import RouterSettings
from tests.services.encoder.samples import write_cross_encoder, write_embedder
from tests.services.tls_ports import router_port
from tests.services.workers import until

JSON = {"content-type": "application/json"}
LIMIT_S = 30.0
PROMPTS = {"query": "q ", "document": ""}


@dataclass
class RunningWorker:
    """An encoder worker that is registered with the router."""

    worker: EncoderWorker
    server: GrpcServer

    async def kill(self) -> None:
        """End the worker as SIGKILL does: calls break, and it is not deregistered."""
        await self.server.server.stop(0)
        registrar = self.worker.registrar
        assert registrar is not None
        for task in registrar._tasks:
            task.cancel()


@dataclass
class EncoderSite:
    """A running gateway with an encoder, its router and workers, and clients."""

    gateway: Gateway
    router: EncoderDispatcher
    workers: list[RunningWorker]
    http: httpx.AsyncClient
    rpc: aio.Channel
    encoder: ServedEncoder
    loaded: LoadedEncoder

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def embed(self, *texts: str, **fields: Any) -> list[list[float]]:
        answer = await self.post("/v1/embeddings", {"input": list(texts), **fields})
        assert answer.status_code == 200, answer.text
        return embeddings_of(answer)

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    async def until_registered(self, count: int) -> None:
        fleet = self.router.fleet
        await until(
            lambda: sum(each.state == "ready" for each in fleet.views(time.monotonic())) == count
        )
        self.encoder.update(await self.gateway.router.encoders(self.encoder.name))

    async def until_ready(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while await self.gateway.not_ready() is not None:  # noqa: ASYNC110 - it asks a router
                await asyncio.sleep(0.05)


OpenSite = Callable[..., Any]


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder"), prompts=PROMPTS)


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("cross"))


@pytest.fixture
async def open_site(embedder: Path) -> AsyncIterator[OpenSite]:
    async with AsyncExitStack() as stack:

        async def open_(
            *,
            path: Path = embedder,
            workers: int = 1,
            keys: ApiKeys | None = None,
            model: ServedModel | None = None,
            worker: dict[str, Any] | None = None,
            **settings: Any,
        ) -> EncoderSite:
            opening = _site(path, workers, keys, model, worker or {}, settings)
            return await stack.enter_async_context(opening)

        yield open_


@pytest.fixture
async def site(open_site: OpenSite) -> EncoderSite:
    opened: EncoderSite = await open_site()
    return opened


@asynccontextmanager
async def running_worker(
    loaded: LoadedEncoder, router: int, settings: dict[str, Any]
) -> AsyncIterator[RunningWorker]:
    """Run a worker that registers with the router on a port."""
    known = {"routers": [f"http://127.0.0.1:{router}"], "heartbeat_s": 0.02, **settings}
    of_worker = EncoderSettings.model_validate(known)
    worker = EncoderWorker(loaded)
    server = GrpcServer("127.0.0.1:0", [SERVICE])
    encode_pb2_grpc.add_EncoderServicer_to_server(EncoderServicer(worker), server.server)
    await server.start()
    registrar = worker.start(f"127.0.0.1:{server.port}", of_worker)
    registrar.start()
    yield RunningWorker(worker, server)
    await registrar.stop()
    await server.stop(0)
    await worker.close()


@asynccontextmanager
async def _site(
    path: Path,
    count: int,
    keys: ApiKeys | None,
    model: ServedModel | None,
    of_worker: dict[str, Any],
    changes: dict[str, Any],
) -> AsyncIterator[EncoderSite]:
    encoder = ServedEncoder.load(str(path), "tiny")
    known = {"model": str(path), "served_model_name": "tiny", "device": "cpu", **of_worker}
    loaded = load_worker(EncoderSettings.model_validate(known))
    router = build_encoder_dispatcher(RouterSettings.model_validate({}), -1e9)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(router_port(encoders=router))
        workers = []
        for number in range(count):
            own = replace(loaded, worker_id=f"encoder-{number}", epoch=f"e{number}")
            workers.append(await stack.enter_async_context(running_worker(own, port, {})))
        settings = GatewaySettings.model_validate(
            {
                "deadline_s": 20.0,
                "routers": [f"http://127.0.0.1:{port}"],
                "encoder_model": str(path),
                **changes,
            }
        )
        served = model or ServedModel.of_encoder(encoder)
        gateway = Gateway(settings, served, keys or ApiKeys(), encoder=encoder)
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
            site = EncoderSite(gateway, router, workers, http, channel, encoder, loaded)
            await site.until_registered(count)
            if model is None:
                await site.until_ready()
            yield site
        server.should_exit = True
        await rpc.stop(0)
        await serving
        await gateway.close()


def embeddings_of(answer: httpx.Response) -> list[list[float]]:
    """Return the embeddings of an answer in JSON, as float32."""
    rows = [entry["embedding"] for entry in answer.json()["data"]]
    found: list[list[float]] = torch.tensor(rows, dtype=torch.float32).tolist()
    return found
