"""The simulated fleet matches results computed by hand."""

import pytest

from services.router.bench import compare, percentile
from services.router.choice import PolicyName
from services.router.simulated_workers import Job
from services.router.simulation import FDC_TABLE_6, Simulation, Speeds, alone_s, draw_jobs

pytestmark = pytest.mark.slow


SINGLE = Speeds(prefill=(1.0,), decode=(1.0,))


def test_single_job_takes_its_prefill_and_its_steps() -> None:
    job = Job(arrival=1.0, prompt=600, output=100, max_tokens=100)
    Simulation([job], PolicyName.SHORTEST_QUEUE, seed=0, speeds=SINGLE).run()
    # Prefill: 600 tokens at 600 tokens/s. Decode: 100 steps of 5 ms, plus 1 µs for each of 600 to
    # 700 resident tokens.
    assert 1.0 + 0.56 <= job.done - job.arrival <= 1.0 + 0.57
    assert alone_s(job, SINGLE) == pytest.approx(1.0 + 100 * (0.005 + 650e-6))


def test_prompts_are_computed_one_at_a_time() -> None:
    jobs = [Job(arrival=0.0, prompt=600, output=1, max_tokens=1) for _ in range(3)]
    Simulation(jobs, PolicyName.SHORTEST_QUEUE, seed=0, speeds=SINGLE).run()
    assert [round(job.done) for job in jobs] == [1, 2, 3]


@pytest.mark.parametrize("name", FDC_TABLE_6)
def test_lengths_have_the_average_and_range_of_the_trace(name: str) -> None:
    trace = FDC_TABLE_6[name]
    jobs = draw_jobs([trace], 2000, utilization=0.5, scale=1.0, seed=0)
    for lengths, (average, minimum, maximum) in (
        ([job.prompt for job in jobs], trace.inputs),
        ([job.output for job in jobs], trace.outputs),
    ):
        assert sum(lengths) / len(lengths) == pytest.approx(average, rel=0.05)
        assert min(lengths) >= round(minimum)
        assert max(lengths) <= round(maximum)


@pytest.mark.parametrize("policy", PolicyName)
def test_all_jobs_finish_and_all_promises_end(policy: PolicyName) -> None:
    jobs = draw_jobs(list(FDC_TABLE_6.values()), 120, utilization=1.5, scale=1 / 64, seed=3)
    run = Simulation(jobs, policy, seed=3)
    run.run()
    assert all(job.done >= job.arrival for job in jobs)
    assert len(run.router.queue) == 0
    assert all(view.promised_tokens == 0 for view in run.router.fleet.views(run.now))


def test_same_seed_repeats_a_run() -> None:
    def ends(seed: int) -> list[float]:
        jobs = draw_jobs([FDC_TABLE_6["arxiv"]], 60, utilization=0.8, scale=1 / 64, seed=1)
        Simulation(jobs, PolicyName.RANDOM, seed).run()
        return [job.done for job in jobs]

    assert ends(1) == ends(1) != ends(2)


@pytest.mark.long
def test_shortest_queue_reduces_the_tail() -> None:
    rows = {row.policy: row for row in compare("arxiv", range(3), 500, 0.75, 1 / 16)}
    assert rows["random"].to_random == 1.0
    assert rows["shortest_queue"].to_random <= 0.8
    assert rows["shortest_queue"].p50_s < rows["random"].p50_s


def test_percentiles() -> None:
    assert percentile([float(value) for value in range(101)], 99) == 99.0
    assert percentile([1.0, 2.0], 50) == 1.5
