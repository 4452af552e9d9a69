"""Faults of workers on GPUs, whose KV moves by READs between GPUs or within one.

UCX may abort a worker that resumes. That counts as a crash: a new epoch.
"""

import asyncio
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.faults.test_killed_workers import read_from_stopped
from tests.faults.test_ranks import check_fault
from tests.harness.trial import LEASE_S, Trial, trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """Two prefill and two decode workers, spread over the GPUs."""
    folder = tmp_path_factory.mktemp("points")
    with trial(folder, "--prefill", "2", "--decode", "2", device="cuda") as running:
        yield running


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_worker_killed_during_a_read(gpus: Trial, role: str) -> None:
    async with gpus.client() as client:
        reply = client.ask(gpus.long)
        sender, reader = await read_from_stopped(gpus)
        victim = sender if role == "prefill" else reader
        gpus.signal(victim, signal.SIGKILL)
        if victim == reader:
            gpus.signal(sender, signal.SIGCONT)
        gpus.points.release()
        await reply.check()
    await gpus.check_recovered(victim)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_worker_stopped_during_a_read(gpus: Trial, role: str) -> None:
    async with gpus.client() as client:
        reply = client.ask(gpus.long)
        sender, reader = await read_from_stopped(gpus)
        victim = sender if role == "prefill" else reader
        if victim == reader:
            gpus.signal(reader, signal.SIGSTOP)
            gpus.signal(sender, signal.SIGCONT)
        gpus.points.release()
        await reply.check()
    await asyncio.sleep(2 * LEASE_S)
    gpus.signal(victim, signal.SIGCONT)
    await gpus.check_recovered(resumed=(victim,))


@pytest.fixture(scope="module")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """One worker of two ranks, each on a GPU of its own."""
    folder = tmp_path_factory.mktemp("points")
    with trial(folder, "--colocated", "--tp", "2", device="cuda") as running:
        yield running


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_or_stopped_while_the_other_waits_in_a_collective(
    gpu_ranks: Trial, rank: int, number: signal.Signals
) -> None:
    """The request continues on the next epoch of the worker."""
    victim = "decode-0.1" if rank else "decode-0"
    gpu_ranks.points.hold("launching", [victim], after=3)
    async with gpu_ranks.client() as client:
        reply = client.ask(gpu_ranks.stream)
        await gpu_ranks.points.reached("launching")
        gpu_ranks.signal(victim, number)
        gpu_ranks.points.release()
        if victim == "decode-0" and number is signal.SIGSTOP:
            await asyncio.sleep(2 * LEASE_S)
            gpu_ranks.signal(victim, signal.SIGCONT)
        await reply.check()
    await gpu_ranks.check_recovered("decode-0")


@pytest.fixture(scope="module")
def ranks_of_two_roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A prefill and a decode worker of two ranks, each on a GPU of its own."""
    with trial(tmp_path_factory.mktemp("points"), "--tp", "2", device="cuda") as running:
        yield running


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize(
    ("moment", "role", "rank", "number"),
    [
        ("at rest", "decode", 0, signal.SIGKILL),
        ("in a collective", "prefill", 0, signal.SIGKILL),
        ("in a collective", "prefill", 1, signal.SIGSTOP),
        ("in a READ", "prefill", 1, signal.SIGKILL),
        ("in a READ", "decode", 0, signal.SIGSTOP),
        ("in a READ", "decode", 1, signal.SIGKILL),
    ],
)
async def test_worker_of_a_killed_or_stopped_rank_becomes_a_new_epoch(
    ranks_of_two_roles: Trial, moment: str, role: str, rank: int, number: signal.Signals
) -> None:
    await check_fault(ranks_of_two_roles, moment, role, rank, number)


@pytest.mark.parametrize("fault", ["out of memory", "kernel"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_forward_pass_fails(gpus: Trial, role: str, fault: str) -> None:
    """The worker ends, since its pages are in an unknown state, and others serve its requests."""
    gpus.points.hold("computing", gpus.workers(role))
    async with gpus.client() as client:
        reply = client.ask(gpus.long)
        victim = await gpus.points.reached("computing")
        gpus.points.set(f"{victim}.gpu", fault)
        gpus.points.release()
        await reply.check()
    await gpus.check_recovered(victim)
