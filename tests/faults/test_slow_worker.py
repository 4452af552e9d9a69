"""A decode worker that runs a tenth of the time is found, and gets almost no more requests."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from tests.harness.points import LIMIT_S
from tests.harness.trial import Trial, trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

STOPPED_S, RUNNING_S = 0.18, 0.02
"""Periods of the slow worker: longer than a step, shorter than the time until it is suspect."""
SLOW = 3.0  # slowdown above which the alert HeadraceWorkerSlow fires
AT_ONCE = 4
REQUESTS = 24


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    with trial(tmp_path_factory.mktemp("slow"), "--prefill", "1", "--decode", "2") as running:
        yield running


@contextmanager
def slowed(site: Trial, process: str) -> Iterator[None]:
    """Let a process run for a tenth of the time until the block ends."""
    end = Event()

    def alternate() -> None:
        while not end.is_set():
            site.signal(process, signal.SIGSTOP)
            end.wait(STOPPED_S)
            site.signal(process, signal.SIGCONT)
            end.wait(RUNNING_S)

    thread = Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


async def ask(site: Trial, number: int) -> None:
    """Send requests, some at a time, and check their answers."""
    async with site.client() as client:
        for _ in range(0, number, AT_ONCE):
            replies = [client.ask(site.stream) for _ in range(AT_ONCE)]
            for reply in replies:
                await reply.check()


async def test_slow_decode_worker_is_found_and_avoided(site: Trial) -> None:
    victim, other = site.workers("decode")
    await ask(site, 4 * AT_ONCE)
    assert all(streams(site).values())
    with slowed(site, victim):
        async with asyncio.timeout(LIMIT_S):
            while figure(site, victim, "slowdown") < SLOW:
                await ask(site, AT_ONCE)
        view = site.running.workers()[victim]
        assert view["state"] == "ready"
        assert "times as long as on the fastest" in str(view["reason"])
        await asyncio.to_thread(site.running.wait_until_idle, LIMIT_S)
        before = streams(site)
        await ask(site, REQUESTS)
        after = streams(site)
    assert figure(site, victim, "inter_token_s") > SLOW * figure(site, other, "inter_token_s")
    assert after[victim] - before[victim] <= REQUESTS / 4, "half of them, if speed did not count"
    await site.check_recovered()


def figure(site: Trial, name: str, field: str) -> float:
    """Return a number of the router's view of a worker; 0 if it is not registered."""
    return float(str(site.running.workers().get(name, {}).get(field, 0)))


def streams(site: Trial) -> dict[str, float]:
    """Return how many streams have ended on each decode worker."""
    return {
        name: site.running.metric(name, "headrace_worker_streams_total")
        for name in site.workers("decode")
    }
