"""The context length that the router reports for a model: what its registered workers can serve."""

from typing import Any

import pytest

from runtime.pages.plan import PageCount
from services.common.listings import ReadinessList
from services.common.placement import (
    Compatibility,
    Heartbeat,
    Placement,
    Registration,
    Role,
    WorkerState,
)
from services.common.router_errors import ErrorCode
from services.gateway.limits import ModelLimits
from services.gateway.settings import GatewaySettings
from services.router.app import build_dispatcher, create_app
from services.router.readiness import readiness
from services.router.settings import RouterSettings
from tests.runtime.pages.plans import compressed_plan
from tests.services.router.samples import COMPATIBLE, beat, is_refusal, place_request, registration

MODEL = COMPATIBLE.model_copy(update={"context_length": 32_768})
OTHER = COMPATIBLE.model_copy(update={"context_length": 4_096})
COMPRESSED = MODEL.model_copy(update={"page_plan": compressed_plan()})
COMPRESSED_PAGES = 1000


def pool(name: str, role: Role, tokens: int, compatibility: Compatibility = MODEL) -> Registration:
    """Return a worker with pages for so many tokens, and `COMPRESSED_PAGES`."""
    pages = PageCount(*(tokens // 16, COMPRESSED_PAGES)[: len(compatibility.page_plan.groups)])
    return registration(name, role, pages_total=pages, compatibility=compatibility)


def idle(worker: Registration, **changes: Any) -> Heartbeat:
    """Return the heartbeat of a worker of which all pages are free."""
    return beat(
        worker.worker_id,
        plan=worker.compatibility.page_plan,
        pages_free=worker.page_count,
        **changes,
    )


SMALL = pool("c0", Role.COLOCATED, 1_024)
LARGE = pool("c1", Role.COLOCATED, 16_384)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], None),
        ([pool("p0", Role.PREFILL, 1 << 20)], None),
        ([pool("c0", Role.COLOCATED, 1 << 20)], 32_768),
        ([pool("c0", Role.COLOCATED, 16_384)], 16_385),
        ([pool("c0", Role.COLOCATED, 16_384), pool("c1", Role.COLOCATED, 20_480)], 20_481),
        ([pool("p0", Role.PREFILL, 1 << 20), pool("d0", Role.DECODE, 8_192)], 8_193),
        ([pool("p0", Role.PREFILL, 8_192), pool("d0", Role.DECODE, 16_384)], 16_385),
        ([pool("c0", Role.COLOCATED, 96, COMPRESSED)], (1000 + 2) * 16 + 64),
        ([pool("c0", Role.COLOCATED, 64, COMPRESSED)], 65),
    ],
)
def test_smaller_of_context_and_pages(workers: list[Registration], expected: int | None) -> None:
    router = build_dispatcher(RouterSettings.model_validate({}), 0.0)
    for worker in workers:
        router.register(worker, 0.0)
    found = readiness(router.fleet.snapshots(0.0))
    assert [model.context_length for model in found] == ([expected] if workers else [])
    assert not any(model.ready for model in found)
    for worker in workers:
        router.heartbeat(idle(worker), 0.1)
        router.heartbeat(idle(worker, state=WorkerState.DRAINING), 0.2)
    found = readiness(router.fleet.snapshots(0.2))
    assert [model.context_length for model in found] == ([expected] if workers else [])


@pytest.mark.parametrize("compatibility", [MODEL, COMPRESSED])
def test_router_places_exactly_what_it_reports(compatibility: Compatibility) -> None:
    """KV of the last output token needs no space."""
    router = build_dispatcher(RouterSettings.model_validate({}), -60.0)
    worker = pool("c0", Role.COLOCATED, 1_024, compatibility)
    router.register(worker, 0.0)
    router.heartbeat(idle(worker), 0.1)
    (found,) = readiness(router.fleet.snapshots(0.2))
    assert found.context_length is not None
    fits = router.submit(place_request(1_000, found.context_length - 1_000), 0.2).answer
    assert isinstance(fits, Placement)
    exceeds = router.submit(place_request(1_000, found.context_length - 999), 0.2).answer
    assert is_refusal(exceeds, ErrorCode.TOO_LARGE)


class _Site:
    """A router, its HTTP API without a socket, and the limits of a gateway that asks it."""

    def __init__(self) -> None:
        self.limits = ModelLimits(GatewaySettings.model_validate({}))
        self.now = 1000.0
        self.restart()

    def restart(self) -> None:
        settings = RouterSettings.model_validate({"gone_after_s": 10})
        self.router = build_dispatcher(settings, self.now)
        self._app = create_app(settings, self.router, clock=lambda: self.now)

    async def join(self, worker: Registration) -> None:
        """Register a worker, which is ready. The gateway then asks the router."""
        self.router.register(worker, self.now)
        self.router.heartbeat(idle(worker), self.now)
        await self.ask()

    async def ask(self) -> None:
        answer = await self._app.test_client().get("/v1/readiness")
        (found,) = ReadinessList.model_validate(await answer.get_json()).models
        self.limits.update(found)


async def test_context_length_is_not_reported_until_all_workers_have_registered() -> None:
    """A smaller worker registers first. Until then the router checks the length of requests."""
    site = _Site()
    await site.join(SMALL)
    assert site.limits.context_length is None
    assert is_refusal(
        site.router.submit(place_request(1_000, 1_000), site.now).answer, ErrorCode.STARTING
    )
    await site.join(LARGE)
    assert site.limits.context_length is None
    assert isinstance(site.router.submit(place_request(1_000, 1_000), site.now).answer, Placement)
    site.now += 10
    await site.ask()
    assert site.limits.context_length == 16_385


async def test_gateway_keeps_its_limit_while_workers_register_with_a_restarted_router() -> None:
    site = _Site()
    site.now += 10
    await site.join(LARGE)
    site.restart()
    await site.join(SMALL)
    assert site.limits.context_length == 16_385
    site.now += 10  # the large worker has not registered
    await site.ask()
    assert site.limits.context_length == 1_025


def test_pair_with_different_context_lengths_is_not_ready() -> None:
    router = build_dispatcher(RouterSettings.model_validate({}), 0.0)
    router.register(registration("p0", Role.PREFILL, compatibility=MODEL), 0.0)
    router.register(registration("d0", Role.DECODE, compatibility=OTHER), 0.0)
    for name in ("p0", "d0"):
        router.heartbeat(beat(name), 0.1)
    (found,) = readiness(router.fleet.snapshots(0.2))
    assert (found.ready, found.context_length) == (False, None)
    assert found.reason == (
        "the workers p0 and d0 are not compatible: context_length is 32768 and 4096"
    )
