"""Overload in a simulation: latency of accepted requests, refusals, and recovery."""

import pytest

from services.router.bench import percentile
from services.router.overload_bench import latencies, run, simulate
from services.router.simulation import FDC_TABLE_6, draw_jobs

pytestmark = pytest.mark.slow

SECONDS = 150.0


def test_overload_keeps_the_latency_of_accepted_requests_and_of_another_tenant() -> None:
    alone, full, over = (run(load, SECONDS, seed=1) for load in (0.0, 1.0, 3.0))
    assert over.accepted >= 500
    assert over.p99_s <= 1.5 * full.p99_s
    assert 0.6 <= over.refused <= 0.75, "about two of three requests are refused"
    assert over.longest_refusal_s == 0.0
    assert over.other_refused == 0.0
    assert over.other_p90_s <= 1.5 * alone.other_p90_s


def test_latency_recovers_within_ten_seconds_after_an_overload() -> None:
    traces = [FDC_TABLE_6["humaneval"]]
    seconds = 40.0
    flood, light, calm = (
        draw_jobs(traces, number, utilization=load, scale=1.0, seed=seed)
        for number, load, seed in ((600, 3.0, 1), (200, 0.4, 2), (200, 0.4, 2))
    )
    end = max(job.arrival for job in flood)
    assert end >= seconds / 2, "the overload lasts"
    for job in (*light, *calm):
        job.arrival += end + 10
    simulate([*flood, *light], seed=1)
    simulate(calm, seed=1)
    assert not any(job.refused for job in light)
    after, usual = percentile(latencies(light), 90), percentile(latencies(calm), 90)
    assert after <= 1.1 * usual
