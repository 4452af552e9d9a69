"""Overload in a simulation: ``python -m services.router.overload_bench``.

Simulates two prefill and three decode workers (`services.router.simulation`) with the default
limits of the router. One tenant sends requests at the capacity of the workers, and then at a
multiple of it. Another tenant sends a tenth of the capacity, alone and beside the first one. Each
figure is the median over the seeds.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from services.router.admission import AdmissionLimits
from services.router.bench import percentile
from services.router.choice import PolicyName
from services.router.fleet import FleetLimits
from services.router.simulated_workers import Job
from services.router.simulation import FDC_TABLE_6, MAX_PLACEMENTS, Simulation, capacity, draw_jobs

FLOOD, OTHER = "flood", "other"
OTHER_LOAD = 0.1
WARM_UP = 0.2
"""Fraction of the time, from the start, that is not measured."""


@dataclass(frozen=True)
class Result:
    """Latencies of accepted requests from arrival to the last token, in seconds.

    Attributes:
        p99_s: p99 of the first tenant.
        other_p90_s: p90 of the second tenant.
        accepted: requests of the first tenant that were accepted.
        refused: share of its requests that were refused.
        other_refused: share of the second tenant's requests that were refused.
        longest_refusal_s: longest time until a request was refused.
    """

    p99_s: float
    other_p90_s: float
    accepted: int
    refused: float
    other_refused: float
    longest_refusal_s: float


def run(load: float, seconds: float, seed: int, trace: str = "humaneval") -> Result:
    """Simulate the first tenant at ``load`` times the capacity, beside the second one."""
    jobs = [*_jobs(FLOOD, load, seconds, seed, trace), *_jobs(OTHER, OTHER_LOAD, seconds, 0, trace)]
    jobs.sort(key=lambda job: job.arrival)
    simulate(jobs, seed)
    counted = [job for job in jobs if job.arrival >= WARM_UP * seconds]
    first = [job for job in counted if job.tenant == FLOOD]
    other = [job for job in counted if job.tenant == OTHER]
    refused = [job for job in counted if job.refused]
    accepted = [job for job in first if not job.refused]
    return Result(
        p99_s=percentile(latencies(accepted), 99) if load else 0.0,
        other_p90_s=percentile(latencies([job for job in other if not job.refused]), 90),
        accepted=len(accepted),
        refused=1 - len(accepted) / len(first) if first else 0.0,
        other_refused=sum(job.refused for job in other) / len(other),
        longest_refusal_s=max((job.done - job.arrival for job in refused), default=0.0),
    )


def simulate(jobs: Sequence[Job], seed: int) -> None:
    """Run the jobs with the default limits of a router."""
    fleet = FleetLimits(max_placements=MAX_PLACEMENTS)
    Simulation(
        jobs, PolicyName.SHORTEST_QUEUE, seed, fleet=fleet, admission=AdmissionLimits()
    ).run()


def latencies(jobs: Sequence[Job]) -> list[float]:
    """Return the time from arrival to the last token of each job, in seconds."""
    return [job.done - job.arrival for job in jobs]


def _jobs(tenant: str, load: float, seconds: float, seed: int, trace: str) -> list[Job]:
    if not load:
        return []
    traces = [FDC_TABLE_6[trace]]
    number = round(load * capacity(traces, 1.0) * seconds)
    jobs = draw_jobs(traces, number, utilization=load, scale=1.0, seed=seed)
    for job in jobs:
        job.tenant = tenant
    return jobs


def main() -> None:
    options = _options()
    seeds = range(1, options.seeds + 1)
    alone, full, over = (
        [run(load, options.seconds, seed) for seed in seeds] for load in (0, 1, options.load)
    )
    print(
        f"{'load':<18}{'p99 s':>8}{'accepted':>10}{'refused':>9}{'other p90 s':>13}{'refused':>9}"
    )
    for name, results in (("other alone", alone), ("1.0", full), (f"{options.load}", over)):
        figures = [
            median(getattr(result, field) for result in results)
            for field in ("p99_s", "accepted", "refused", "other_p90_s", "other_refused")
        ]
        p99, accepted, refused, other, other_refused = figures
        print(
            f"{name:<18}{p99:>8.2f}{accepted:>10.0f}{refused:>9.2f}{other:>13.2f}{other_refused:>9.2f}"
        )
    ratios = [o.p99_s / f.p99_s for o, f in zip(over, full, strict=True)]
    others = [o.other_p90_s / a.other_p90_s for o, a in zip(over, alone, strict=True)]
    print(f"p99 of accepted requests, overload / capacity: {median(ratios):.2f}")
    print(f"p90 of the other tenant, overload / alone: {median(others):.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.router.overload_bench")
    parser.add_argument("--load", type=float, default=3.0, help="multiple of the capacity")
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated seconds of a run")
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
