"""A slow worker among healthy ones, in a simulation: tail latency, oscillation and recovery."""

from functools import partial

import pytest

from services.router.bench import percentile
from services.router.choice import PolicyName
from services.router.simulation import FDC_TABLE_6, Simulation, Speeds, draw_jobs
from services.router.straggler_bench import HEALTHY, latencies, simulate, with_slow

pytestmark = pytest.mark.slow


@pytest.mark.few(1)
@pytest.mark.parametrize("utilization", [0.1, 0.6])
def test_slow_workers_hardly_affect_the_tail(utilization: float) -> None:
    slow = with_slow("both", 10.0)
    without, before, after = (
        percentile(latencies(simulate("humaneval", 300, utilization, 0, *case)), 99)
        for case in ((HEALTHY, True), (slow, False), (slow, True))
    )
    assert before > 2.5 * without, "queued tokens alone do not show that a worker is slow"
    assert after < 1.5 * without


def test_workers_of_equal_speed_are_chosen_as_without_measured_speeds() -> None:
    """Lengths and loads differ, and so do the steps."""
    placed = [
        [job.workers for job in simulate("imdb", 400, 0.8, 5, HEALTHY, reports_pace=reports)]
        for reports in (True, False)
    ]
    assert placed[0] == placed[1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_slow_worker_serves_when_the_others_cannot(role: str) -> None:
    """At 1.6 times the capacity of the healthy workers, requests queue, and every worker works."""
    jobs = simulate("humaneval", 500, 1.6, 2, with_slow(role, 2.0))
    number = 3 if role == "prefill" else 4
    share = sum(f"{role[0]}{number - 1}" in (job.workers or ()) for job in jobs) / len(jobs)
    assert share > (0.1 if role == "prefill" else 0.0)


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_that_is_fast_again_gets_its_share(role: str) -> None:
    jobs = draw_jobs(
        [FDC_TABLE_6["humaneval"]], 2400, utilization=0.5, scale=1.0, seed=3, speeds=HEALTHY
    )
    run = Simulation(jobs, PolicyName.SHORTEST_QUEUE, 3, speeds=with_slow(role, 10.0))
    workers = run.prefill if role == "prefill" else run.decode
    name = f"{role[0]}{len(workers) - 1}"
    recovers = jobs[len(jobs) // 3].arrival
    run.at(recovers, partial(setattr, workers[name], "speed", 1.0))
    run.run()

    def share(begin: float, end: float) -> float:
        part = [job for job in jobs if begin <= job.arrival < end]
        return sum(name in (job.workers or ()) for job in part) / len(part)

    settled = recovers + 400.0
    assert share(60.0, recovers) < 0.05
    assert share(settled, jobs[-1].arrival) > 0.6 / len(workers)


def test_slow_worker_is_tried_rarely() -> None:
    """Its share does not alternate between none and all."""
    jobs = simulate("humaneval", 1200, 0.3, 4, with_slow("both", 10.0))
    slow = ("p2", "d3")
    tries = sum(bool(job.workers and set(slow) & set(job.workers)) for job in jobs)
    assert 0 < tries < 0.01 * len(jobs)


def test_speeds_of_all_workers_may_differ_without_one_being_starved() -> None:
    speeds = Speeds((1.0, 0.4, 0.2), (1.0, 0.9, 0.8))
    jobs = simulate("humaneval", 500, 0.7, 6, speeds)
    counts = {f"p{i}": sum(f"p{i}" in (job.workers or ()) for job in jobs) for i in range(3)}
    assert counts["p0"] > counts["p1"] > counts["p2"] > 0.02 * len(jobs)


def test_new_worker_gets_its_share_at_once() -> None:
    """A worker without measurements counts as one of the fastest."""
    jobs = simulate("humaneval", 400, 0.5, 7)
    first = jobs[:200]
    for name, index in (("p0", 0), ("p1", 0), ("d0", 1), ("d1", 1), ("d2", 1)):
        assert sum((job.workers or ("", ""))[index] == name for job in first) > 0.2 * len(first)
