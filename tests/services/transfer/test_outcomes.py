"""Waiting for codec launches blocks neither other work nor the exit of the process."""

import asyncio
import subprocess
import sys
import threading

import pytest

import codec
from services.transfer.outcomes import outcome_of


class Launch:
    """A `codec.Pending` that ends when the test sets ``ended``."""

    def __init__(self, value: object, *, done: bool = False) -> None:
        self.value, self.done, self.seconds = value, done, 0.0
        self.ended = threading.Event()

    def result(self) -> object:
        if not self.done:
            self.ended.wait()
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


async def test_outcomes_arrive_in_launch_order() -> None:
    launches = [Launch(number) for number in range(4)]
    found: list[object] = []

    async def wait(launch: Launch) -> None:
        found.append(await outcome_of(launch))

    tasks = [asyncio.create_task(wait(launch)) for launch in launches]
    await asyncio.sleep(0.01)
    assert found == []
    for launch in launches:
        launch.ended.set()
    await asyncio.gather(*tasks)
    assert found == [0, 1, 2, 3]
    assert await outcome_of(Launch(7, done=True)) == 7


async def test_error_of_a_launch_is_raised_where_it_is_awaited() -> None:
    launch = Launch(codec.ChecksumMismatch("differs"))
    launch.ended.set()
    with pytest.raises(codec.ChecksumMismatch):
        await outcome_of(launch)


async def test_cancelled_wait_does_not_disturb_others() -> None:
    launch, other = Launch(1), Launch(2)
    task = asyncio.create_task(outcome_of(launch))
    await asyncio.sleep(0.01)
    task.cancel()
    launch.ended.set()
    other.ended.set()
    assert await outcome_of(other) == 2
    assert task.cancelled()


def test_process_exits_while_a_launch_never_ends() -> None:
    program = """
import asyncio
from services.transfer.outcomes import outcome_of
from tests.services.transfer.test_outcomes import Launch

async def main():
    asyncio.create_task(outcome_of(Launch(1)))
    await asyncio.sleep(0.05)

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
