"""Placements are released whatever happens to their requests: the gateway with a real router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from services.common.http_server import HttpServer, listen
from services.common.listings import WorkerView
from services.common.placement import Outcome, Placement, PlaceRequest, Release, Role
from services.common.token_ids import pack_tokens
from services.gateway.gateway import Gateway
from services.gateway.keys import ApiKeys
from services.gateway.requests import GenerationOptions, GenerationRequest, RequestContext
from services.gateway.router_client import RouterClient
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.router.app import build_dispatcher, create_app
from services.router.dispatcher import Dispatcher
from services.router.server import http_config
from services.router.settings import RouterSettings
from tests.services.gateway.fakes import FakeWorker, running, until
from tests.services.router.samples import beat, registration

REQUEST = PlaceRequest(request_id="r", prompt_tokens=100, max_tokens=10, wait_s=60)


class Cluster:
    """A real router with one colocated worker, whose heartbeats tests send."""

    def __init__(self, url: str, dispatcher: Dispatcher, model: str) -> None:
        self.url = url
        self.dispatcher = dispatcher
        self.model = model
        self.worker = FakeWorker("c0")

    def register(self) -> None:
        known = registration("c0", Role.COLOCATED, epoch=self.worker.epoch, model=self.model)
        known = known.model_copy(update={"address": self.worker.address["address"]})
        self.dispatcher.register(known, self.now)
        self.beat()

    def beat(self, **load: Any) -> None:
        self.dispatcher.heartbeat(beat("c0", epoch=self.worker.epoch, **load), self.now)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def view(self) -> WorkerView:
        return self.dispatcher.fleet.views(self.now)[0]

    async def until_released(self) -> None:
        """Wait until the router counts no placement and has no queue."""
        fleet = self.dispatcher.fleet
        await until(lambda: fleet.idle and not fleet._records and not len(self.dispatcher.queue))


@pytest.fixture
async def cluster(model: ServedModel) -> AsyncIterator[Cluster]:
    settings = RouterSettings.model_validate({"suspect_after_s": 300, "gone_after_s": 600})
    dispatcher = build_dispatcher(settings, asyncio.get_running_loop().time() - 1000)
    listener = listen("127.0.0.1", 0)
    server = HttpServer(http_config(create_app(settings, dispatcher)))
    serving = asyncio.create_task(server.serve([listener]))
    opened = Cluster(f"http://127.0.0.1:{listener.getsockname()[1]}", dispatcher, model.name)
    async with running(opened.worker):
        opened.register()
        yield opened
    server.should_exit = True
    await serving


@asynccontextmanager
async def open_client(cluster: Cluster) -> AsyncIterator[RouterClient]:
    client = RouterClient([cluster.url], token=None, timeout_s=5)
    yield client
    await client.close()


@asynccontextmanager
async def open_gateway(cluster: Cluster, model: ServedModel) -> AsyncIterator[Gateway]:
    settings = GatewaySettings.model_validate({"routers": [cluster.url]})
    gateway = Gateway(settings, model, ApiKeys())
    yield gateway
    await gateway.close()


async def _iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _request(gateway: Gateway, now: float) -> GenerationRequest:
    context = RequestContext("r", None, now, now + 60)
    return gateway.builder.build(
        context, pack_tokens([1] * 100), GenerationOptions(max_tokens=10), chat=False
    )


async def test_place_call_that_is_cancelled_at_any_moment_leaves_no_load(cluster: Cluster) -> None:
    async with open_client(cluster) as client:
        placed = 0
        for iterations in range(60):

            async def place() -> None:
                nonlocal placed
                with await client.place(REQUEST):
                    placed += 1
                    await asyncio.sleep(60)

            task = asyncio.create_task(place())
            await _iterations(iterations)
            await _cancel(task)
        for delay_s in (0.001, 0.002, 0.004, 0.008, 0.016, 1.0):
            task = asyncio.create_task(place())
            await asyncio.sleep(delay_s)
            await _cancel(task)
        assert placed, "the last call was placed before it was cancelled"
        await cluster.until_released()


async def test_queued_place_call_that_is_cancelled_leaves_the_queue(cluster: Cluster) -> None:
    cluster.beat(pages_free=0, running=1)
    async with open_client(cluster) as client:
        tasks = [asyncio.create_task(client.place(REQUEST)) for _ in range(5)]
        await until(lambda: len(cluster.dispatcher.queue) == 5)
        for task in tasks:
            await _cancel(task)
        cluster.beat()
        await cluster.until_released()


async def test_place_call_that_is_cancelled_while_its_answer_is_sent_leaves_no_load(
    cluster: Cluster,
) -> None:
    async with open_client(cluster) as client:
        for iterations in range(0, 40, 2):
            cluster.beat(pages_free=0, running=1)
            task = asyncio.create_task(client.place(REQUEST))
            await until(lambda: len(cluster.dispatcher.queue) == 1)
            cluster.beat()
            assert cluster.view.promised_tokens, "the router has placed the call"
            await _iterations(iterations)
            if task.done():
                (await task).__exit__(None, None, None)
            await _cancel(task)
            await cluster.until_released()


async def test_request_that_is_cancelled_at_any_moment_leaves_no_load(
    cluster: Cluster, model: ServedModel
) -> None:
    async with open_gateway(cluster, model) as gateway:
        for at in range(40):

            async def generate() -> None:
                async with aclosing(gateway.generate([_request(gateway, cluster.now)])) as output:
                    async for _ in output:
                        pass

            task = asyncio.create_task(generate())
            if at < 30:
                await _iterations(4 * at)
            else:
                await asyncio.sleep(0.002 * (at - 29))
            await _cancel(task)
        await cluster.until_released()


async def test_deadlines_of_milliseconds_leave_no_load(
    cluster: Cluster, model: ServedModel
) -> None:
    async with open_gateway(cluster, model) as gateway:

        async def generate(deadline_s: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    request = _request(gateway, cluster.now)
                    async with aclosing(gateway.generate([request])) as output:
                        async for _ in output:
                            pass

        await asyncio.gather(*(generate(0.001 * ms) for ms in range(1, 51)))
        await cluster.until_released()


async def test_drain_releases_requests_that_are_being_placed(
    cluster: Cluster, model: ServedModel
) -> None:
    async with open_gateway(cluster, model) as gateway:

        async def generate() -> None:
            async with aclosing(gateway.generate([_request(gateway, cluster.now)])) as output:
                async for _ in output:
                    pass

        tasks = [asyncio.create_task(generate()) for _ in range(20)]
        await _iterations(20)
        await gateway.drain(0.0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, Exception) for result in results)
        await cluster.until_released()


async def test_release_that_overtakes_its_place_call_is_not_forgotten(cluster: Cluster) -> None:
    dispatcher, now = cluster.dispatcher, cluster.now
    dispatcher.release(Release(placement_id=REQUEST.placement_id, outcome=Outcome.CANCELLED), now)
    assert not isinstance(dispatcher.submit(REQUEST, now).answer, Placement)
    assert cluster.view.promised_tokens == 0
