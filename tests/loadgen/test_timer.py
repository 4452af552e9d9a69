"""Timer tests, with the kernel timer and with the event loop's."""

import asyncio
import time
from collections.abc import Callable

import psutil
import pytest
import uvloop

from loadgen.timer import open_timer

LOOPS = [uvloop.new_event_loop, asyncio.new_event_loop]


@pytest.fixture(params=["kernel", "refused", "not Linux"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "refused":
        monkeypatch.setattr("loadgen.timer.time.CLOCK_MONOTONIC", 999)
    if request.param == "not Linux":
        monkeypatch.setattr("loadgen.timer.sys.platform", "darwin")
    return str(request.param)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_sleeps_end_and_kernel_timer_is_never_early(
    new_loop: Callable[[], asyncio.AbstractEventLoop], kind: str
) -> None:
    async def sleeps() -> list[float]:
        short = []
        with open_timer() as timer:
            for seconds in (1e-10, 1e-4, 0.0123, 0.05, 0.003):
                began = time.monotonic()
                await timer.sleep(seconds)
                short.append(seconds - (time.monotonic() - began))
        return short

    with asyncio.Runner(loop_factory=new_loop) as loop:
        short = loop.run(sleeps())
    assert kind != "kernel" or max(short) <= 0, short


async def test_wake_ends_a_sleep_early() -> None:
    with open_timer() as timer:
        asyncio.get_running_loop().call_later(0.01, timer.wake)
        async with asyncio.timeout(10):
            await timer.sleep(3600)


async def test_closed_timers_leave_no_open_file() -> None:
    before = psutil.Process().num_fds()
    for _ in range(3):
        with open_timer() as timer:
            await timer.sleep(1e-3)
    assert psutil.Process().num_fds() == before
