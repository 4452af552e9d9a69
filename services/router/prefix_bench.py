"""Prompts with common beginnings in a simulation: ``python -m services.router.prefix_bench``.

Simulates replicas of one prefill and one decode worker (`services.router.simulation`). Each prompt
has one of several prefixes and tokens of its own; arrivals are Poisson. Workers have a prefix cache
of bounded size. All cases get the same requests:

- ``shortest queue``: the router gets no hashes and compares queued tokens alone.
- ``affinity``: the gateway sends the hashes of the prompt.

The load is the arrival rate relative to the capacity of the prefill workers without any reuse.
``floor`` is the time to the first token if prefixes are cached and all workers are idle.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from statistics import fmean, median
from typing import Self

from services.common.prefix_hashes import ENDS, HASH_BYTES
from services.router.bench import percentile
from services.router.choice import PolicyName
from services.router.fleet import FleetLimits
from services.router.simulated_workers import PAGE_PLAN, Job, Machine
from services.router.simulation import MAX_PLACEMENTS, Simulation, Speeds

H200 = Machine(
    token_s=21.8e-6,
    square_s=4.62e-10,
    least_s=3.61e-3,
    latency_s=7.0e-3,
    step_s=3.7e-3,
    resident_s=4.7e-8,
    max_running=256,
    pages=55_742,
    caches=True,
)
"""Llama-3-8B, dense, bf16, on one H200 per worker, from ``services/sizing/figures``: times of a
prompt of 512 to 32,000 tokens within 10 %, of a decode step, and pages of its KV memory."""
SMALL_PAGES = 4_096
"""Pages of a worker for `Workload.SMALL`: 65,536 tokens."""
REPLICAS = 64
PREFIXES = 512
PREFIX_TOKENS = 4000
OWN_TOKENS = (64, 448)
"""Minimum and maximum tokens after the prefix."""
OUTPUT_TOKENS = (32, 224)
WARM_UP = 0.5
"""Fraction of the requests, the first ones, that is not measured: until caches are full."""
_SHARED_PAGES = PAGE_PLAN.full(PREFIX_TOKENS)


class Workload(StrEnum):
    """Choice of the prefix of each request.

    Attributes:
        UNIFORM: all prefixes are equally frequent.
        ZIPF: the frequency of the n-th prefix is proportional to 1 / n.
        SMALL: as ``UNIFORM``, with `SMALL_PAGES` on each worker, in which 16 prefixes fit.
        NONE: each request has a prefix of its own.
    """

    UNIFORM = "uniform"
    ZIPF = "zipf"
    SMALL = "small caches"
    NONE = "without reuse"


@dataclass(frozen=True)
class Result:
    """Result of one case. Times to the first token are in seconds.

    Attributes:
        prefilled: share of the prompt tokens that prefill workers had cached.
        received: share of the prompt tokens that decode workers had cached.
    """

    p50_s: float
    p90_s: float
    prefilled: float
    received: float

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Self:
        first_s = [job.first - job.arrival for job in jobs]
        total = sum(job.prompt for job in jobs)
        prefilled, received = (sum(job.cached[at] for job in jobs) / total for at in (0, 1))
        return cls(percentile(first_s, 50), percentile(first_s, 90), prefilled, received)


def draw_jobs(workload: Workload, number: int, load: float, seed: int) -> list[Job]:
    """Return jobs with Poisson arrivals.

    Args:
        load: arrival rate relative to the capacity of the prefill workers without reuse.
    """
    rng = Random(seed)
    rate = load * REPLICAS / H200.prompt_s(PREFIX_TOKENS + round(fmean(OWN_TOKENS)))
    frequency = [1 / (rank + 1) if workload is Workload.ZIPF else 1.0 for rank in range(PREFIXES)]
    drawn = rng.choices(range(PREFIXES), frequency, k=number)
    now, jobs = 0.0, []
    for index, shared in enumerate(drawn):
        now += rng.expovariate(rate)
        own = PREFIXES + index
        length = PREFIX_TOKENS + rng.randint(*OWN_TOKENS)
        prefix = own if workload is Workload.NONE else shared
        job = Job(
            now,
            length,
            output=rng.randint(*OUTPUT_TOKENS),
            max_tokens=OUTPUT_TOKENS[1],
            pages=(
                _pages(prefix, 0, _SHARED_PAGES),
                _pages(own, _SHARED_PAGES, PAGE_PLAN.full(length)),
            ),
            prefix=tuple(
                _hash(prefix if end <= PREFIX_TOKENS else own, end) for end in ENDS if end <= length
            ),
        )
        jobs.append(job)
    return jobs


def _pages(text: int, begin: int, end: int) -> range:
    return range(text << 32 | begin, text << 32 | end)


def _hash(text: int, end: int) -> bytes:
    return (text << 32 | end).to_bytes(HASH_BYTES, "big")


def simulate(workload: Workload, jobs: Sequence[Job], seed: int, *, affinity: bool) -> list[Job]:
    """Return copies of the jobs after the warm-up, simulated with or without their hashes."""
    run = [replace(job, prefix=job.prefix if affinity else ()) for job in jobs]
    machine = replace(H200, pages=SMALL_PAGES) if workload is Workload.SMALL else H200
    Simulation(
        run,
        PolicyName.SHORTEST_QUEUE,
        seed,
        fleet=FleetLimits(max_placements=MAX_PLACEMENTS),
        speeds=Speeds((1.0,) * REPLICAS, (1.0,) * REPLICAS),
        machine=machine,
    ).run()
    return run[round(WARM_UP * len(run)) :]


def floor_s(jobs: Sequence[Job]) -> float:
    """Return the p90 time to the first token if prefixes were cached and all workers idle."""
    cached = PAGE_PLAN.filled(range(_SHARED_PAGES), PREFIX_TOKENS)
    alone = [H200.prompt_s(job.prompt - cached, cached) + H200.latency_s for job in jobs]
    return percentile(alone, 90)


def main() -> None:
    options = _options()
    print(
        f"{'workload':<14}{'load':>5}  {'p50 s':>16}{'p90 s: shortest, affinity, floor':>36}"
        f"{'ratio':>7}{'cached: prefill':>17}{'decode':>14}"
    )
    for workload in map(Workload, options.workloads):
        for load in options.loads:
            runs = [_compare(workload, options.jobs, load, seed) for seed in range(options.seeds)]
            _print(workload, load, runs)


def _compare(
    workload: Workload, number: int, load: float, seed: int
) -> tuple[Result, Result, float]:
    """Return the results of shortest queue and of affinity, and the floor."""
    jobs = draw_jobs(workload, number, load, seed)
    shortest, affinity = (
        Result.of(simulate(workload, jobs, seed, affinity=affinity)) for affinity in (False, True)
    )
    return shortest, affinity, floor_s(jobs[round(WARM_UP * number) :])


def _print(workload: Workload, load: float, runs: Sequence[tuple[Result, Result, float]]) -> None:
    """Print medians over the runs. The ratio is the median of the ratios of p90."""
    cases = [[run[0] for run in runs], [run[1] for run in runs]]
    p50, p90, prefilled, received = (
        [median(getattr(result, name) for result in case) for case in cases]
        for name in ("p50_s", "p90_s", "prefilled", "received")
    )
    floor = median(run[2] for run in runs)
    ratio = median(affinity.p90_s / shortest.p90_s for shortest, affinity, _ in runs)
    print(
        f"{workload:<14}{load:>5.2f}  {p50[0]:>8.4f}{p50[1]:>8.4f}{p90[0]:>18.4f}{p90[1]:>9.4f}"
        f"{floor:>9.4f}{ratio:>7.3f}{prefilled[0]:>9.1%}{prefilled[1]:>8.1%}"
        f"{received[0]:>7.1%}{received[1]:>7.1%}",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.router.prefix_bench")
    names = [workload.value for workload in Workload]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--jobs", type=int, default=30_000, help="number of requests in a run")
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
