"""Every 503 and 429 says when to retry."""

import asyncio

import httpx

from headrace.v1 import error_pb2
from tests.services.gateway.conftest import Site
from tests.services.gateway.failures import completion, failing
from tests.services.gateway.fakes import hang


def check(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1


async def test_lost_workers_have_retry_after(site: Site) -> None:
    site.worker.script = failing(error_pb2.ERROR_CODE_PREFILL_LOST)
    check(await completion(site))


async def test_failure_of_several_choices_has_retry_after(site: Site) -> None:
    site.worker.script = failing(error_pb2.ERROR_CODE_INTERNAL, 5)
    check(await completion(site, n=2))


async def test_request_cut_by_a_drain_has_retry_after(site: Site) -> None:
    site.worker.script = hang
    cut = asyncio.create_task(completion(site))
    await site.router.started(1)
    await site.gateway.drain(0.0)
    check(await cut)
    check(await completion(site))
    check(await site.http.get("/ready"))


async def test_not_ready_has_retry_after(site: Site) -> None:
    site.router.not_ready = "no prefill worker is registered"
    check(await site.http.get("/ready"))
