"""A slow worker among healthy ones in a simulation: ``python -m services.router.straggler_bench``.

Simulates two healthy prefill and three healthy decode workers (`services.router.simulation`), and
one more prefill worker, decode worker or both that are slower by a factor. All cases get the same
requests, at a share of the capacity of the healthy workers. ``without`` has healthy workers only.
In ``before``, workers do not report their pace, so the policy compares queued tokens alone. In
``after``, it also counts the measured speed. Latencies are from arrival to the last token.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from services.router.bench import WARM_UP, percentile
from services.router.choice import PolicyName
from services.router.fleet import FleetLimits
from services.router.simulated_workers import Job
from services.router.simulation import FDC_TABLE_6, MAX_PLACEMENTS, Simulation, Speeds, draw_jobs

HEALTHY = Speeds((1.0, 1.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Row:
    """Medians over the seeds.

    Attributes:
        slow: role of the slow workers.
        p50_s, p99_s: percentiles of the latency in the cases ``without``, ``before`` and ``after``
            of the module docstring, in seconds.
        share: share of the requests that a slow worker served, before and after.
    """

    slow: str
    utilization: float
    p50_s: tuple[float, ...]
    p99_s: tuple[float, ...]
    share: tuple[float, ...]


def with_slow(role: str, factor: float) -> Speeds:
    """Return the healthy workers and a slow one of this role; for "both", one of each role."""
    speed = (1.0 / factor,)
    return Speeds(
        HEALTHY.prefill + speed * (role in ("prefill", "both")),
        HEALTHY.decode + speed * (role in ("decode", "both")),
    )


def compare(
    factor: float, utilizations: Sequence[float], number: int, seeds: Sequence[int], trace: str
) -> Iterator[Row]:
    """Yield a row for each role of the slow workers and each utilization."""
    for slow in ("prefill", "decode", "both"):
        speeds = with_slow(slow, factor)
        for utilization in utilizations:
            runs = [
                [simulate(trace, number, utilization, seed, *case) for seed in seeds]
                for case in ((HEALTHY, True), (speeds, False), (speeds, True))
            ]
            p50, p99 = (
                tuple(median(percentile(latencies(jobs), rank) for jobs in case) for case in runs)
                for rank in (50, 99)
            )
            share = tuple(median(slow_share(jobs) for jobs in case) for case in runs[1:])
            yield Row(slow, utilization, p50, p99, share)


def simulate(
    trace: str,
    number: int,
    utilization: float,
    seed: int,
    speeds: Speeds = HEALTHY,
    reports_pace: bool = True,
) -> list[Job]:
    """Return the jobs after the warm-up, at a share of the capacity of the healthy workers."""
    jobs = draw_jobs(
        [FDC_TABLE_6[trace]], number, utilization=utilization, scale=1.0, seed=seed, speeds=HEALTHY
    )
    fleet = FleetLimits(max_placements=MAX_PLACEMENTS)
    policy = PolicyName.SHORTEST_QUEUE
    Simulation(jobs, policy, seed, fleet=fleet, speeds=speeds, reports_pace=reports_pace).run()
    return jobs[round(WARM_UP * number) :]


def latencies(jobs: Sequence[Job]) -> list[float]:
    """Return the time from arrival to the last token of each job, in seconds."""
    return [job.done - job.arrival for job in jobs]


def slow_share(jobs: Sequence[Job]) -> float:
    """Return the share of the jobs that a slow worker has served."""
    slow = {f"p{len(HEALTHY.prefill)}", f"d{len(HEALTHY.decode)}"}
    return sum(not slow.isdisjoint(job.workers or ()) for job in jobs) / len(jobs)


def main() -> None:
    options = _options()
    print(f"{'slow':<9}{'load':>5}{'p50 s: without, before, after':>32}{'p99 s':>26}{'share':>16}")
    for row in compare(
        options.factor, options.loads, options.jobs, range(options.seeds), options.workload
    ):
        p50, p99 = ("".join(f"{value:>9.2f}" for value in each) for each in (row.p50_s, row.p99_s))
        share = "".join(f"{value:>8.1%}" for value in row.share)
        print(f"{row.slow:<9}{row.utilization:>5.2f}     {p50}{p99}{share}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.router.straggler_bench")
    parser.add_argument("--factor", type=float, default=10.0, help="slowness of the slow workers")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.1, 0.4, 0.7])
    parser.add_argument("--jobs", type=int, default=1500, help="number of requests in a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workload", choices=FDC_TABLE_6, default="humaneval")
    return parser.parse_args()


if __name__ == "__main__":
    main()
