"""Latency under each policy, and CPU time of the router: ``python -m services.router.bench``.

Simulates two prefill and three decode workers of unequal speed (`services.router.simulation`) with
Poisson arrivals. Prompt and output lengths are those of table 6 of "FDC: Fast KV Dimensionality
Compression for Efficient LLM Inference", times ``--scale``. All policies get the same requests. The
column ``floor`` is the p99 latency of the same requests if each of them ran alone on the fastest
workers.

CPU time is measured for one placement without HTTP, for a loaded router without HTTP
(`services.router.load_bench`), and for a placement over HTTP (`services.router.http_bench`).
``--workloads``, ``--loads`` and ``--http`` without a value skip their part, for example
``--workloads --loads --http 300`` measures placements over HTTP only.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean, quantiles

from services.common.placement import Outcome, Placement, PlaceRequest, Release, Role
from services.common.prefix_hashes import ENDS, HASH_BYTES, MAX_BLOCKS
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.http_bench import WORKERS, HttpCost
from services.router.http_bench import measure as measure_http
from services.router.load_bench import GOAL, LOADS, Cost, Load, LoadBench
from services.router.queue import PlacementQueue
from services.router.simulated_workers import heartbeat, registration
from services.router.simulation import FDC_TABLE_6, Simulation, alone_s, draw_jobs

WARM_UP = 0.1
"""Fraction of the requests, the first ones, that is not measured."""
WORKLOADS = {name: [trace] for name, trace in FDC_TABLE_6.items()} | {
    "mix": list(FDC_TABLE_6.values())
}


@dataclass(frozen=True)
class Row:
    """Latency of one workload under one policy, in seconds. Values are means over the seeds.

    ``to_random`` is the p99 latency divided by that of the random policy with the same seed.
    ``to_random_least`` and ``to_random_most`` are the minimum and maximum of this ratio over the
    seeds.
    """

    workload: str
    policy: str
    p50_s: float
    p99_s: float
    p99_floor_s: float
    to_random: float
    to_random_least: float
    to_random_most: float


def main() -> None:
    options = _options()
    if options.workloads:
        print(
            f"{'workload':<11}{'policy':<15}{'p50 s':>8}{'p99 s':>8}{'floor':>8}{'p99/floor':>10}"
            f"{'p99/random':>12} (min–max)"
        )
    rows = []
    for workload in options.workloads:
        for row in compare(
            workload, range(options.seeds), options.jobs, options.utilization, options.scale
        ):
            rows.append(row)
            print(
                f"{row.workload:<11}{row.policy:<15}{row.p50_s:>8.2f}{row.p99_s:>8.2f}"
                f"{row.p99_floor_s:>8.2f}{row.p99_s / row.p99_floor_s:>10.2f}"
                f"{row.to_random:>12.2f} ({row.to_random_least:.2f}–{row.to_random_most:.2f})",
                flush=True,
            )
    costs = [_print_cost(load, options.seconds) for load in options.loads]
    decisions = {
        workers: min(decision_s(workers, hashes=options.hashes) for _ in range(5)) * 1e6
        for workers in (WORKERS, 64, 256)
    }
    for workers, cost_us in decisions.items():
        print(f"place and release among {workers} workers: {cost_us:.0f} µs")
    calls = [
        _print_http(rate, options.seconds, decisions[WORKERS], options.hashes)
        for rate in options.http
    ]
    if options.json:
        report = {
            "options": {k: v for k, v in vars(options).items() if k not in ("json", "loads")},
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "latency": [asdict(row) for row in rows],
            "loads": [
                asdict(load) | asdict(cost) for load, cost in zip(options.loads, costs, strict=True)
            ],
            "decision_us": decisions,
            "http": [asdict(cost) for cost in calls],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _print_cost(load: Load, seconds: float) -> Cost:
    """Measure and print the cost of a load, and its ratio to the bounds in `GOAL`."""
    cost = LoadBench(load).run(seconds)
    p99_ms, goal_ms = cost.heartbeat_p99_s * 1e3, GOAL.heartbeat_p99_s * 1e3
    print(
        f"{load.workers} workers, {cost.queued} queued, {cost.placements_per_s:.0f} placements/s: "
        f"{cost.core:.1%} of a core (goal {GOAL.core:.0%}, ratio {cost.core / GOAL.core:.2f}), "
        f"heartbeat p99 {p99_ms:.1f} ms (goal {goal_ms:.0f}, ratio {p99_ms / goal_ms:.2f})",
        flush=True,
    )
    return cost


def _print_http(rate: float, seconds: float, decision_us: float, hashes: int) -> HttpCost:
    """Measure and print the cost of placements over HTTP, with its floor."""
    cost = measure_http(rate, seconds, hashes)
    floor_us = decision_us + cost.echo_us
    print(
        f"{cost.placements_per_s:.0f} placements/s over HTTP: router {cost.router_us:.0f} µs of "
        f"CPU time per placement (floor {floor_us:.0f}: {decision_us:.0f} without HTTP and "
        f"{cost.echo_us:.0f} to echo the same bytes; ratio {cost.router_us / floor_us:.2f}), "
        f"client {cost.client_us:.0f} µs, latency p50 {cost.p50_us:.0f} µs (echo "
        f"{cost.echo_p50_us:.0f}), p99 {cost.p99_us:.0f} µs",
        flush=True,
    )
    return cost


def _load(text: str) -> Load:
    workers, queued, rate = text.split(",")
    return Load(int(workers), int(queued), float(rate))


def compare(
    workload: str, seeds: Sequence[int], number: int, utilization: float, scale: float
) -> Iterator[Row]:
    """Yield one row for each policy, the random policy first."""
    randoms: list[float] = []
    for policy in sorted(PolicyName, key=lambda policy: policy is not PolicyName.RANDOM):
        medians, tails, floors = [], [], []
        for seed in seeds:
            jobs = draw_jobs(
                WORKLOADS[workload], number, utilization=utilization, scale=scale, seed=seed
            )
            Simulation(jobs, policy, seed).run()
            counted = jobs[round(WARM_UP * number) :]
            medians.append(percentile([job.done - job.arrival for job in counted], 50))
            tails.append(percentile([job.done - job.arrival for job in counted], 99))
            floors.append(percentile([alone_s(job) for job in counted], 99))
        randoms = randoms or tails
        ratios = [tail / other for tail, other in zip(tails, randoms, strict=True)]
        yield Row(
            workload,
            policy.value,
            fmean(medians),
            fmean(tails),
            fmean(floors),
            fmean(ratios),
            min(ratios),
            max(ratios),
        )


def percentile(values: Sequence[float], rank: int) -> float:
    """Return the ``rank``-th percentile, interpolated."""
    return quantiles(values, n=100, method="inclusive")[rank - 1]


def decision_s(workers: int, calls: int = 500, *, hashes: int = 0) -> float:
    """Return the CPU time to place and release one request, in seconds, without HTTP.

    Half of the ``workers`` are prefill workers. The result is the mean over ``calls`` requests.

    Args:
        hashes: number of hashes of each prompt. The prompts are equal, but for the last block, and
            nearly all workers have got some of them.
    """
    router = Dispatcher(
        Fleet(FleetLimits()),
        PlacementQueue(0),
        PolicyName.SHORTEST_QUEUE,
        Random(0),
        output_reserve=256,
        max_wait_s=0.0,
    )
    for index in range(workers):
        role = Role.PREFILL if index % 2 else Role.DECODE
        router.register(registration(f"w{index}", role), 0.0)
        router.heartbeat(heartbeat(f"w{index}", 0, 0, 0, []), 0.0)
    length = ENDS[hashes - 1] if hashes else 1000
    prompts = [_prompt(hashes, number) for number in range(calls)]

    def place(prefix: tuple[bytes, ...]) -> Placement:
        request = PlaceRequest(request_id="r", prompt_tokens=length, max_tokens=100)
        answer = router.submit(request, 0.0, prefix).answer
        if not isinstance(answer, Placement):
            raise RuntimeError(f"not placed: {answer!r}")
        return answer

    def release(placement: Placement) -> None:
        end = Release(placement_id=placement.placement_id, outcome=Outcome.OK)
        router.release(end, 0.0)

    for placement in [place(prefix) for prefix in prompts[: 2 * workers]]:
        release(placement)
    began = time.process_time()
    for prefix in prompts:
        release(place(prefix))
    return (time.process_time() - began) / calls


def _prompt(hashes: int, number: int) -> tuple[bytes, ...]:
    """Return hashes of a prompt; only the last one depends on ``number``."""
    blocks = [block.to_bytes(HASH_BYTES, "big") for block in range(hashes)]
    return (*blocks[:-1], (hashes + number).to_bytes(HASH_BYTES, "big")) if hashes else ()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.router.bench")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--loads",
        nargs="*",
        type=_load,
        default=LOADS,
        metavar="WORKERS,QUEUED,PLACEMENTS_PER_S",
        help="loads of which the CPU time is measured",
    )
    parser.add_argument(
        "--http",
        nargs="*",
        type=float,
        default=[300.0],
        metavar="PLACEMENTS_PER_S",
        help="rates at which placements over HTTP are measured; 0: as many as possible",
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="simulated or measured seconds of a load"
    )
    parser.add_argument(
        "--hashes",
        type=int,
        default=0,
        choices=range(MAX_BLOCKS + 1),
        metavar="NUMBER",
        help="hashes of each prompt of which the placement is measured; default: none",
    )
    parser.add_argument("--jobs", type=int, default=1500, help="number of requests in a run")
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of runs of each policy, each with its own seed"
    )
    parser.add_argument(
        "--utilization", type=float, default=0.75, help="arrival rate / capacity of the workers"
    )
    parser.add_argument(
        "--scale", type=float, default=1 / 16, help="factor applied to FDC's token counts"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
