"""``GET /ready`` of a gateway with a real router: whether a request can be placed, and why not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from quart import Quart

from services.common.http_server import HttpServer, listen
from services.common.placement import Role
from services.gateway.gateway import Gateway
from services.gateway.http.routes import build_app
from services.gateway.keys import ApiKeys
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.router.app import create_app
from services.router.server import http_config
from services.router.settings import RouterSettings
from tests.services.router.app import JSON
from tests.services.router.samples import COMPATIBLE, beat, registration


@dataclass
class Site:
    """A gateway, the URL of its router, and the requests that the router received."""

    gateway: Gateway
    probes: httpx.AsyncClient
    router: httpx.AsyncClient
    seen: list[str]

    async def join(self, worker_id: str, role: Role, state: str = "ready", **changes: Any) -> None:
        """Register a worker of the gateway's model."""
        body = registration(worker_id, role, model=self.gateway.model.name, **changes)
        await self.router.post("/v1/register", content=body.model_dump_json())
        load = beat(worker_id, state=state)
        await self.router.post("/v1/heartbeat", content=load.model_dump_json())

    async def reason(self) -> str | None:
        """Return the reason of an uncached answer of ``/ready``; None if it is ready."""
        self.gateway._ready_until = 0.0
        response = await self.probes.get("/ready")
        return response.json().get("reason") if response.status_code == 503 else None


@pytest.fixture
async def site(model: ServedModel) -> AsyncIterator[Site]:
    seen: list[str] = []
    app = create_app(RouterSettings.model_validate({}))
    record(app, seen.append)
    server = HttpServer(http_config(app))
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    gateway = Gateway(GatewaySettings.model_validate({"routers": [url]}), model, ApiKeys())
    transport = httpx.ASGITransport(build_app(gateway))
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, headers=JSON) as router,
        httpx.AsyncClient(base_url="http://localhost", transport=transport) as probes,
    ):
        yield Site(gateway, probes, router, seen)
    await gateway.close()
    server.should_exit = True
    await serving


def record(app: Quart, add: Callable[[str], None]) -> None:
    """Call ``add`` with the path of every request."""
    from quart import request

    @app.before_request
    async def see() -> None:
        add(request.path)


async def test_incompatible_workers_are_not_ready_and_the_reason_names_the_difference(
    site: Site,
) -> None:
    other = COMPATIBLE.model_copy(update={"kv_format": "fp8"})
    await site.join("prefill-0", Role.PREFILL, compatibility=other)
    await site.join("decode-0", Role.DECODE)
    assert await site.reason() == (
        "the workers prefill-0 and decode-0 are not compatible: kv_format is 'fp8' and 'dense'"
    )
    await site.join("decode-1", Role.DECODE, compatibility=other)
    assert await site.reason() is None


async def test_missing_role_is_the_reason(site: Site) -> None:
    served = site.gateway.model.name
    assert await site.reason() == f"no worker of the model {served!r} is registered"
    await site.join("decode-0", Role.DECODE)
    assert await site.reason() == "no prefill worker is registered"
    await site.join("prefill-0", Role.PREFILL, state="draining")
    assert await site.reason() == "no prefill worker is ready: prefill-0 is draining"
    blocked = beat("prefill-0", state="not_ready", reason="no landing slots")
    await site.router.post("/v1/heartbeat", content=blocked.model_dump_json())
    assert await site.reason() == (
        "no prefill worker is ready: prefill-0 is not ready (no landing slots)"
    )
    await site.join("prefill-1", Role.PREFILL)
    assert await site.reason() is None


async def test_prefill_worker_that_decodes_is_ready_alone(site: Site) -> None:
    await site.join("prefill-0", Role.PREFILL, decodes=True)
    assert await site.reason() is None


async def test_workers_of_another_model_are_the_reason(site: Site) -> None:
    other = registration("c0", Role.COLOCATED, model="other")
    await site.router.post("/v1/register", content=other.model_dump_json())
    assert "is registered, only of 'other'" in (await site.reason() or "")


async def test_both_answers_are_cached_and_shared(site: Site) -> None:
    for ready in (False, True):
        if ready:
            await site.join("c0", Role.COLOCATED)
        site.seen.clear()
        site.gateway._ready_until = 0.0
        answers = await asyncio.gather(*(site.probes.get("/ready") for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200 if ready else 503}
        assert len(site.seen) == 1
