"""Turns of a chat are placed on the same workers: the gateway with a real router, fake workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from services.common.http_server import HttpServer, listen
from services.common.placement import Role
from services.common.prefix_hashes import HEADER, encode_hashes, prefix_hashes
from services.common.token_ids import pack_tokens
from services.gateway.gateway import Gateway
from services.gateway.keys import ApiKeys
from services.gateway.requests import GenerationOptions, RequestContext
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.router.app import build_dispatcher, create_app
from services.router.dispatcher import Dispatcher
from services.router.server import http_config
from services.router.settings import RouterSettings
from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import FakeStream, FakeWorker, running, say
from tests.services.router.samples import beat, registration

PAGES = 4096


@dataclass
class Service:
    """A gateway, a router, and two colocated workers, whose heartbeats tests send."""

    gateway: Gateway
    dispatcher: Dispatcher
    workers: list[FakeWorker]

    def beat(self, worker: FakeWorker, queue_tokens: int = 0) -> None:
        load = beat(
            worker.worker_id, epoch=worker.epoch, pages_free=PAGES, queue_tokens=queue_tokens
        )
        self.dispatcher.heartbeat(load, _now())

    def register(self, worker: FakeWorker) -> None:
        role, name = Role.COLOCATED, self.gateway.model.name
        known = registration(
            worker.worker_id, role, epoch=worker.epoch, model=name, pages_total=PAGES
        )
        known = known.model_copy(update={"address": worker.address["address"]})
        self.dispatcher.register(known, _now())
        self.beat(worker)

    async def complete(self, prompt: list[int], choices: int = 1) -> str:
        """Return the id of the worker that completes a prompt."""
        before = [len(worker.streams) for worker in self.workers]
        context = RequestContext("r", None, _now(), _now() + 60)
        options = GenerationOptions(max_tokens=4, n=choices)
        request = self.gateway.builder.build(context, pack_tokens(prompt), options, chat=True)
        async with aclosing(self.gateway.generate([request])) as output:
            async for _ in output:
                pass
        used = [
            worker.worker_id
            for worker, streams in zip(self.workers, before, strict=True)
            if len(worker.streams) > streams
        ]
        assert len(used) == 1
        return used[0]


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
async def service(model: ServedModel) -> AsyncIterator[Service]:
    settings = RouterSettings.model_validate({"suspect_after_s": 300, "gone_after_s": 600})
    dispatcher = build_dispatcher(settings, _now() - 1000)
    listener = listen("127.0.0.1", 0)
    server = HttpServer(http_config(create_app(settings, dispatcher)))
    serving = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    gateway = Gateway(GatewaySettings.model_validate({"routers": [url]}), model, ApiKeys())
    workers = [FakeWorker("c0"), FakeWorker("c1")]
    async with running(*workers):
        opened = Service(gateway, dispatcher, workers)
        for worker in workers:
            worker.script = say(7)
            opened.register(worker)
        yield opened
        await gateway.close()
    server.should_exit = True
    await serving


async def test_turns_of_a_chat_are_placed_on_one_worker_while_the_load_is_balanced(
    service: Service,
) -> None:
    for chat in range(6):
        history = [chat] * 200
        used = set()
        for turn in range(4):
            for worker in service.workers:  # the load varies, but less than reuse saves
                service.beat(worker, queue_tokens=10 * (turn + chat + len(worker.worker_id)) % 50)
            used.add(await service.complete(history))
            history = [*history, 7, *[turn] * 100]
        assert len(used) == 1


async def test_chats_are_spread_over_the_workers(service: Service) -> None:
    used = [await service.complete([chat] * 200) for chat in range(20)]
    assert set(used) == {"c0", "c1"}


async def test_overload_moves_a_chat_which_then_stays(service: Service) -> None:
    history = [5] * 640
    first = await service.complete(history)
    old = next(worker for worker in service.workers if worker.worker_id == first)
    service.beat(old, queue_tokens=900)
    assert await service.complete(history) == first, "it computes 640 tokens fewer"
    service.beat(old, queue_tokens=1000)
    moved = await service.complete(history)
    assert moved != first
    service.beat(old, queue_tokens=100)
    service.beat(next(w for w in service.workers if w is not old), queue_tokens=0)
    assert await service.complete(history) == moved, "both have it cached"


async def test_restarted_worker_gets_no_chat_for_what_it_had_cached(service: Service) -> None:
    history = [5] * 640
    first = await service.complete(history)
    old = next(worker for worker in service.workers if worker.worker_id == first)
    await old.stop()
    old.epoch = "restarted"
    await old.start()
    service.register(old)
    service.beat(old, queue_tokens=10)
    assert await service.complete(history) != first


async def test_choices_of_a_request_share_a_worker_and_its_cache(service: Service) -> None:
    for worker in service.workers:
        worker.script = _say_to_all
    used = [await service.complete([3] * 200, choices=3) for _ in range(4)]
    assert len(set(used)) == 1


async def _say_to_all(stream: FakeStream) -> None:
    for choice in range(3):
        await stream.tokens(7, choice=choice)
        await stream.end(choice=choice)


async def test_hashes_are_sent_beside_a_body_that_earlier_routers_know(site: Site) -> None:
    site.worker.script = say(7)
    for tokens in (63, 300):
        body = {"model": site.model.name, "prompt": [9] * tokens, "max_tokens": 4}
        assert (await site.http.post("/v1/completions", json=body)).status_code == 200
    short, long = site.router.headers
    assert HEADER not in short
    assert long[HEADER] == encode_hashes(prefix_hashes(pack_tokens([9] * 300)))
