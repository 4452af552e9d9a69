"""A router that restarts: requests are placed as soon as it is back, within their time limits."""

import asyncio

import pytest

from headrace.v1 import error_pb2
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import completion, failing, outcomes
from tests.services.gateway.fakes import FakeStream, say, until

DOWN_S = 0.5


async def test_replay_waits_for_a_router_that_restarts(site: Site) -> None:
    """After its restart, the router first has no workers, until they have registered again."""
    ids = site.encode("one two three")

    async def fail_without_router(stream: FakeStream) -> None:
        await stream.tokens(*ids[:2])
        await site.router.stop()
        await stream.fail(error_pb2.ERROR_CODE_INTERNAL)

    site.worker.queued = [fail_without_router]
    site.worker.script = say(*ids)
    running = asyncio.create_task(completion(site))
    await site.router.started(1)
    await asyncio.sleep(DOWN_S)
    site.router.refusals = [(503, "no_workers"), (404, "unknown_model"), (429, "queue_full")]
    assert not running.done()
    await site.router.start()
    response = await running
    assert response.json()["choices"][0]["text"] == "one two three"
    assert not site.router.refusals
    await until(lambda: ("ok", None) in outcomes(site))


@pytest.mark.parametrize("code", [None, "closing", "starting"])
async def test_new_request_waits_for_a_router_that_restarts(site: Site, code: str | None) -> None:
    site.worker.script = say(5)
    if code is None:
        await site.router.stop()
    else:
        site.router.refusals = [(503, code)] * 2
    running = asyncio.create_task(completion(site))
    await asyncio.sleep(DOWN_S)
    if code is None:
        assert not running.done()
        await site.router.start()
    assert (await running).status_code == 200


async def test_new_request_waits_for_workers_of_a_router_that_restarts(site: Site) -> None:
    """The router answers again before its workers have registered."""
    site.worker.script = say(5)
    site.router.refusals = [(503, "closing"), (503, "starting"), (503, "starting")]
    assert (await completion(site)).status_code == 200
    assert not site.router.refusals


async def test_new_request_does_not_wait_for_workers(site: Site) -> None:
    site.router.refusals = [(503, "no_workers")]
    assert (await completion(site)).status_code == 503
    assert len(site.router.places) == 1


async def test_wait_for_a_router_ends_with_the_time_in_the_queue(open_site: OpenSite) -> None:
    site: Site = await open_site(queue_wait_s=0.5)
    await site.router.stop()
    response = await asyncio.wait_for(completion(site), 10)
    assert response.status_code == 503
    assert "no router is reachable" in response.json()["error"]["message"]


async def test_wait_for_a_router_ends_at_the_deadline(open_site: OpenSite) -> None:
    site: Site = await open_site(deadline_s=2.0)
    site.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, 5)]
    running = asyncio.create_task(completion(site))
    await site.router.started(1)
    await site.router.stop()
    assert (await asyncio.wait_for(running, 10)).status_code in (503, 504)
