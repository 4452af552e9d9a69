"""The supervisor's view of the reports of a process."""

import asyncio
import os

import pytest

from services.local import liveness
from services.local.liveness import Liveness

pytestmark = pytest.mark.timeout(30)

TICKS = 5


class Clock:
    """A clock that advances with each wait of the supervisor."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    async def silence_of(self, process: Liveness) -> float:
        return await process.silence(self, self.sleep)


async def some_ticks() -> None:
    for _ in range(TICKS):
        await asyncio.sleep(0)


async def test_process_that_never_reports_has_the_time_of_a_start() -> None:
    with Liveness() as watched:
        assert await Clock().silence_of(watched) == liveness.START_S


async def test_process_that_has_reported_is_silent_for_less_time() -> None:
    with Liveness() as watched:
        os.write(watched.pipe.descriptor, b".")
        assert await Clock().silence_of(watched) == liveness.SILENT_S


async def test_process_that_reports_never_hangs() -> None:
    clock = Clock()
    with Liveness() as watched:
        waiting = asyncio.create_task(clock.silence_of(watched))
        while clock.now < 10 * liveness.START_S:
            os.write(watched.pipe.descriptor, b".")
            await some_ticks()
            assert not waiting.done()
        waiting.cancel()


async def test_time_in_which_the_supervisor_does_not_run_does_not_count() -> None:
    """The supervisor may be suspended, and the process with it."""
    clock = Clock()
    with Liveness() as watched:
        os.write(watched.pipe.descriptor, b".")
        waiting = asyncio.create_task(clock.silence_of(watched))
        await some_ticks()
        clock.now += 1e6
        await some_ticks()
        assert not waiting.done()
        assert await waiting == pytest.approx(liveness.SILENT_S, abs=liveness.TICK_S)
