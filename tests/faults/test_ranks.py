"""SIGKILL, SIGSTOP and out of memory of one rank: its worker ends and becomes a new epoch.

`tests/services/worker/ranks/test_faults.py` tests how the ranks of one worker end. UCX may abort a
worker that resumes. That counts as a crash: a new epoch.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import product
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

import pytest

from tests.harness.trial import LEASE_S, Trial, trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

RANKS = 2
STOPPED_S = 2 * LEASE_S
"""Time after which a first rank resumes. Other ranks that wait for it have ended by then."""
PASSED = 7
"""Steps of a decode worker before the fault."""
EACH_ONCE = {
    ("in a collective", "prefill", 1, SIGKILL),
    ("in a collective", "decode", 0, SIGKILL),
    ("in a collective", "decode", 1, SIGSTOP),
    ("in a READ", "prefill", 1, SIGSTOP),
    ("in a READ", "decode", 1, SIGKILL),
}
"""Faults that are not marked as further cases: moment, role, rank and signal."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """Two prefill and two decode workers of two ranks each."""
    flags = ("--prefill", "2", "--decode", "2", "--tp", str(RANKS))
    with trial(tmp_path_factory.mktemp("points"), *flags) as running:
        yield running


def process_of(worker: str, rank: int) -> str:
    return f"{worker}.{rank}" if rank else worker


@asynccontextmanager
async def at_rest(ranks: Trial, role: str, rank: int) -> AsyncIterator[str]:
    """Return the process of a rank without work; send requests after the fault."""
    async with ranks.client() as client:
        yield process_of(ranks.workers(role)[0], rank)
        for reply in [client.ask(case) for case in (ranks.short, ranks.long) * 2]:
            await reply.check()


@asynccontextmanager
async def in_a_collective(ranks: Trial, role: str, rank: int) -> AsyncIterator[str]:
    """Hold a rank in a prefill or in a decode step; return its process.

    The other rank waits for it in a collective.
    """
    processes = [process_of(worker, rank) for worker in ranks.workers(role)]
    ranks.points.hold("launching", processes, after=PASSED if role == "decode" else 0)
    async with ranks.client() as client:
        reply = client.ask(ranks.stream if role == "decode" else ranks.long)
        yield await ranks.points.reached("launching")
        ranks.points.release()
        await reply.check()


@asynccontextmanager
async def in_a_read(ranks: Trial, role: str, rank: int) -> AsyncIterator[str]:
    """Stop a READ between two ranks of one number; return the process of the role's rank."""
    ranks.points.hold("pull", [process_of(worker, rank) for worker in ranks.workers("decode")])
    async with ranks.client() as client:
        reply = client.ask(ranks.long)
        reader = await ranks.points.reached("pull")
        sender = process_of(ranks.busy("prefill"), rank)
        ranks.signal(sender, SIGSTOP)
        ranks.points.hold("reading", [reader])
        ranks.points.release("pull")
        await ranks.points.reached("reading")
        yield sender if role == "prefill" else reader
        if role == "decode":
            ranks.signal(sender, SIGCONT)
        ranks.points.release()
        await reply.check()


MOMENTS = {"at rest": at_rest, "in a collective": in_a_collective, "in a READ": in_a_read}


@pytest.mark.parametrize(
    ("moment", "role", "rank", "number"),
    [
        pytest.param(
            *fault,
            marks=[] if fault in EACH_ONCE else pytest.mark.campaign,
            id=f"{fault[-1].name} {fault[0]}-{fault[1]}-{fault[2]}",
        )
        for fault in product(MOMENTS, ("prefill", "decode"), range(RANKS), (SIGKILL, SIGSTOP))
    ],
)
async def test_worker_of_a_killed_or_stopped_rank_becomes_a_new_epoch(
    ranks: Trial, moment: str, role: str, rank: int, number: Signals
) -> None:
    await check_fault(ranks, moment, role, rank, number)


async def check_fault(ranks: Trial, moment: str, role: str, rank: int, number: Signals) -> None:
    """Signal a rank of a worker at a moment, and check that requests go on and nothing is left."""
    fault: AbstractAsyncContextManager[str] = MOMENTS[moment](ranks, role, rank)
    async with fault as victim:
        ranks.signal(victim, number)
        stopped_at = time.monotonic()
    worker = victim.partition(".")[0]
    if number is SIGSTOP and rank == 0:
        await asyncio.sleep(stopped_at + STOPPED_S - time.monotonic())
        ranks.signal(victim, SIGCONT)
        if moment != "in a collective":  # then no other rank waits for the stopped one
            await ranks.check_recovered(resumed=(worker,))
            return
    await ranks.check_recovered(worker)


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.campaign), "decode"])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.campaign), 1])
async def test_worker_whose_rank_runs_out_of_memory_becomes_a_new_epoch(
    ranks: Trial, role: str, rank: int
) -> None:
    async with in_a_collective(ranks, role, rank) as victim:
        ranks.points.set(f"{victim}.gpu", "out of memory")
    await ranks.check_recovered(victim.partition(".")[0])
