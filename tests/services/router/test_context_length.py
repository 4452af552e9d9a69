"""The context length that the router reports for a model: what its registered workers can serve."""

import pytest

from services.common.placement import Placement, Registration, Role, StoredPages, WorkerState
from services.router.app import build_dispatcher
from services.router.errors import TooLarge
from services.router.readiness import readiness
from services.router.settings import RouterSettings
from tests.services.router.samples import COMPATIBLE, beat, place_request, registration

MODEL = COMPATIBLE.model_copy(update={"context_length": 32_768})
OTHER = COMPATIBLE.model_copy(update={"context_length": 4_096})
STORED = StoredPages(total=1000, sink_pages=1, window=64)


def pool(name: str, role: Role, tokens: int, stored: StoredPages | None = None) -> Registration:
    pages = tokens // 16
    return registration(name, role, pages_total=pages, stored=stored, compatibility=MODEL)


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
        ([pool("c0", Role.COLOCATED, 96, STORED)], (1000 + 2) * 16 + 64),
        ([pool("c0", Role.COLOCATED, 64, STORED)], 65),
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
        free = {"pages_free": worker.pages_total, "stored_free": STORED.total}
        router.heartbeat(beat(worker.worker_id, **free), 0.1)
        router.heartbeat(beat(worker.worker_id, state=WorkerState.DRAINING, **free), 0.2)
    found = readiness(router.fleet.snapshots(0.2))
    assert [model.context_length for model in found] == ([expected] if workers else [])


@pytest.mark.parametrize("stored", [None, STORED])
def test_router_places_exactly_what_it_reports(stored: StoredPages | None) -> None:
    """KV of the last output token needs no space."""
    router = build_dispatcher(RouterSettings.model_validate({}), -60.0)
    router.register(pool("c0", Role.COLOCATED, 1_024, stored), 0.0)
    router.heartbeat(beat("c0", pages_free=64, stored_free=STORED.total), 0.1)
    (found,) = readiness(router.fleet.snapshots(0.2))
    assert found.context_length is not None
    fits = router.submit(place_request(1_000, found.context_length - 1_000), 0.2).answer
    assert isinstance(fits, Placement)
    exceeds = router.submit(place_request(1_000, found.context_length - 999), 0.2).answer
    assert isinstance(exceeds, TooLarge)


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
