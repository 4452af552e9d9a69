"""Prompts with common beginnings in a simulation: time to the first token, and placements."""

import pytest

from services.router import prefix_bench
from services.router.prefix_bench import Result, Workload, draw_jobs, simulate
from services.router.simulated_cache import SimulatedCache

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _few_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_bench, "REPLICAS", 8)
    monkeypatch.setattr(prefix_bench, "PREFIXES", 64)


def test_first_token_comes_sooner_with_affinity() -> None:
    jobs = draw_jobs(Workload.SMALL, 1500, 0.9, seed=0)
    shortest, affinity = (
        Result.of(simulate(Workload.SMALL, jobs, 0, affinity=affinity))
        for affinity in (False, True)
    )
    assert affinity.p90_s < 0.4 * shortest.p90_s
    assert shortest.prefilled < 0.5 < 0.8 < affinity.prefilled


def test_prompts_without_reuse_are_placed_as_without_hashes() -> None:
    jobs = draw_jobs(Workload.NONE, 600, 0.9, seed=1)
    placed = [
        [job.workers for job in simulate(Workload.NONE, jobs, 1, affinity=affinity)]
        for affinity in (False, True)
    ]
    assert placed[0] == placed[1]


def test_load_above_the_capacity_without_reuse_is_served() -> None:
    """Queued prompts are placed where they are cached, not where a worker is free first."""
    jobs = draw_jobs(Workload.ZIPF, 2000, 2.5, seed=2)
    run = Result.of(simulate(Workload.ZIPF, jobs, 2, affinity=True))
    assert run.p90_s < 0.1
    assert run.prefilled > 0.85


def test_cache_evicts_the_pages_that_were_not_used_for_longest() -> None:
    cache = SimulatedCache(5)
    first, second = [range(3)], [range(8, 10), range(10, 11)]
    cache.insert(first)
    cache.insert(second)
    assert (len(cache), cache.match(first), cache.match(second)) == (5, 2, 3)
    cache.insert(first)
    assert (cache.match(first), cache.match(second)) == (3, 2)
