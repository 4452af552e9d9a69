"""A running worker reports when it is not ready, and when it is ready again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.lifecycle import _tend
from tests.services.workers import until


@pytest.mark.parametrize("draining", [False, True])
async def test_readiness_follows_the_worker_unless_it_drains(draining: bool) -> None:
    served: list[bool] = []

    async def set_serving(serving: bool) -> None:
        served.append(serving)

    rounds: list[None] = []
    worker: Any = SimpleNamespace(
        observe=lambda: rounds.append(None), not_ready=None, draining=draining
    )
    server: Any = SimpleNamespace(set_serving=set_serving)
    registrar: Any = SimpleNamespace(not_ready=None)
    tending = asyncio.create_task(_tend(worker, server, registrar, 0.001))
    for reason in ("blocked", None):
        worker.not_ready = reason
        rounds.clear()
        await until(lambda: len(rounds) > 1)
        assert registrar.not_ready == (None if draining else reason)
    assert served == ([] if draining else [False, True])
    tending.cancel()
