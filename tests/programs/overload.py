"""Overload of a deployment by one of two tenants: ``python -m tests.programs.overload``.

The capacity is found first: the highest rate at which at most a twentieth of a tenant's requests
is refused. The rate doubles until more are refused; bisection then narrows it down. For each seed,
three runs follow:

- alone: the second tenant alone, at a tenth of the capacity;
- capacity: the first tenant alone, at the capacity;
- overload: the first tenant at a multiple of the capacity, and the second one at a tenth of it.

After the overload, small requests of the first tenant are sent one after the other until one is as
fast as they were on the idle deployment. Arrivals are Poisson, and latencies count from the
scheduled time to the last token. All requests are sent by one process on the same machine.
"""

import argparse
import asyncio
import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from random import Random
from statistics import median, quantiles

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from loadgen.arrivals import Poisson
from loadgen.clock import Clock
from loadgen.record import Record
from loadgen.runner import Runner
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import Options
from loadgen.target.http import HttpTarget
from loadgen.workload import RequestSpec
from tests.harness.deployment import Running, deployed

FLOOD, OTHER = "flood", "other"
KEYS = {FLOOD: "sk-flood", OTHER: "sk-other"}
OTHER_LOAD = 0.1
WARM_UP_S = 10.0
SEARCH_S = 60.0
"""Seconds of each run that searches for the capacity."""
SATURATED = 0.05
"""Fraction of refused requests above which a deployment is saturated."""
BISECTIONS = 3
MAX_RATE = 1024.0
PROBES = 5
"""Number of probes whose median latency is that of the idle deployment."""
PROBE_GAP_S = 0.25
RECOVERED = 1.5
"""Latency of a probe, relative to the idle deployment, at which the deployment has recovered."""
RECOVERY_LIMIT_S = 60.0
VOCABULARY = range(1000, 20_000)  # token ids of prompts
console = Console(width=120, highlight=False)
BOUNDS = {"p99": 1.5, "other p90": 1.5, "recovery s": 10.0, "lag p99 s": 0.1}


@dataclass(frozen=True)
class Lengths:
    """Least and greatest tokens of prompts and of outputs, which are uniform between them."""

    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass
class Run:
    """Figures of one run; times in seconds. Percentiles are those of answered requests.

    Attributes:
        accepted: answered requests, by tenant.
        refused: requests with 429, by tenant.
        failed: other failures, by tenant.
        percentiles: p50, p90 and p99 of the latency, by tenant.
        refusal_p99_s: p99 of the time from the send of a request to its 429.
        lag_p99_s: p99 of the delay of the load generator.
    """

    accepted: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    percentiles: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    refusal_p99_s: float = 0.0
    lag_p99_s: float = 0.0

    @classmethod
    def of(cls, records: dict[str, list[Record]]) -> "Run":
        """Evaluate the records of a run after its warm-up, by tenant."""
        run = cls()
        lags = list[float]()
        refusals = list[float]()
        for tenant, every in records.items():
            due = [record for record in every if record.due >= WARM_UP_S]
            answered = [record for record in due if record.succeeded]
            refused = [record for record in due if "status 429" in record.detail]
            run.accepted[tenant], run.refused[tenant] = len(answered), len(refused)
            run.failed[tenant] = len(due) - len(answered) - len(refused)
            latencies = [(record.ended or 0.0) - record.due for record in answered]
            p50, p90, p99 = (percentile(latencies, rank) for rank in (50, 90, 99))
            run.percentiles[tenant] = p50, p90, p99
            lags += [record.sent - record.due for record in due if record.sent is not None]
            refusals += [(record.ended or 0.0) - (record.sent or 0.0) for record in refused]
        run.lag_p99_s = percentile(lags, 99)
        run.refusal_p99_s = percentile(refusals, 99)
        return run


@dataclass(frozen=True)
class Seed:
    """The runs of one seed.

    Attributes:
        recovery_s: time from the last request of the overload until a probe was fast.
        retry_after_s: values of ``Retry-After`` in answers to probes during the overload.
    """

    seed: int
    alone: Run
    capacity: Run
    overload: Run
    recovery_s: float
    retry_after_s: list[int]

    @property
    def ratios(self) -> dict[str, float]:
        """The figures that have bounds in `BOUNDS`."""
        return {
            "p99": self.overload.percentiles[FLOOD][2] / self.capacity.percentiles[FLOOD][2],
            "other p90": self.overload.percentiles[OTHER][1] / self.alone.percentiles[OTHER][1],
            "recovery s": self.recovery_s,
            "lag p99 s": max(run.lag_p99_s for run in (self.alone, self.capacity, self.overload)),
        }


def percentile(values: Sequence[float], rank: int) -> float:
    """Return the ``rank``-th percentile, interpolated; NaN without values."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[rank - 1]


class Bench:
    """Sends the requests of the tenants to a deployment."""

    def __init__(self, running: Running, lengths: Lengths) -> None:
        self._running = running
        self._lengths = lengths

    async def capacity(self) -> float:
        """Return the highest rate that does not saturate the deployment, in requests/s.

        Raises:
            RuntimeError: if every rate saturates it, or none does.
        """
        low, high = 0.0, 1.0
        while not await self._saturated(high):
            low, high = high, 2 * high
            if high > MAX_RATE:
                raise RuntimeError(f"the deployment is not saturated by {MAX_RATE} requests/s")
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if await self._saturated(middle):
                high = middle
            else:
                low = middle
        if low == 0.0:
            raise RuntimeError(f"the deployment is saturated by {high} requests/s")
        return low

    async def _saturated(self, rate: float) -> bool:
        records = (await self.send({FLOOD: rate}, SEARCH_S, seed=0))[FLOOD]
        due = [record for record in records if record.due >= WARM_UP_S]
        answered = sum(record.succeeded for record in due)
        refused = 1 - answered / len(due)
        console.print(f"{rate:g}/s: {answered} answered, {refused:.1%} refused")
        return refused > SATURATED

    async def measure(self, capacity: float, load: float, accepted: int, seed: int) -> Seed:
        """Make the three runs of one seed, with ``accepted`` answers at the capacity."""
        seconds = WARM_UP_S + accepted / capacity * 1.1
        usual_s = median([await self._probe() for _ in range(PROBES)])
        alone = Run.of(await self.send({OTHER: OTHER_LOAD * capacity}, seconds, seed))
        full = Run.of(await self.send({FLOOD: capacity}, seconds, seed))
        rates = {FLOOD: load * capacity, OTHER: OTHER_LOAD * capacity}
        async with asyncio.TaskGroup() as tasks:
            retries = tasks.create_task(self._retry_afters(seconds))
            recovery = tasks.create_task(self._recovery(seconds, usual_s))
            over = Run.of(await self.send(rates, seconds, seed))
        return Seed(seed, alone, full, over, recovery.result(), retries.result())

    async def send(
        self, rates: dict[str, float], seconds: float, seed: int
    ) -> dict[str, list[Record]]:
        """Send Poisson arrivals of each tenant, and return their records by tenant."""
        options = Options(self._running.model, ignore_eos=True)
        url = f"{self._running.url}/v1"
        targets = {name: HttpTarget(url, options, api_key=KEYS[name]) for name in rates}
        runners = {
            name: Runner(self._schedule(rate, seconds, f"{name}-{seed}"), targets[name])
            for name, rate in rates.items()
        }
        try:
            await asyncio.gather(*(runner.run(Clock()) for runner in runners.values()))
        finally:
            for target in targets.values():
                await target.close()
        return {name: runner.records for name, runner in runners.items()}

    def _schedule(self, rate: float, seconds: float, seed: str) -> list[ScheduledRequest]:
        rng = Random(seed)
        times = Poisson(rate).times(rng.getrandbits(31))
        return [
            ScheduledRequest(self._request(rng), due)
            for due in takewhile(lambda due: due < seconds, times)
        ]

    def _request(self, rng: Random) -> RequestSpec:
        prompt, output = rng.randint(*self._lengths.prompt), rng.randint(*self._lengths.output)
        return RequestSpec(tuple(rng.choices(VOCABULARY, k=prompt)), prompt, output)

    async def _post(self) -> httpx.Response:
        request = self._request(Random(0))
        body = {"prompt": request.prompt, "max_tokens": request.output_tokens, "ignore_eos": True}
        async with httpx.AsyncClient(trust_env=False, timeout=600) as client:
            headers = {"authorization": f"Bearer {KEYS[FLOOD]}"}
            return await client.post(
                f"{self._running.url}/v1/completions", json=body, headers=headers
            )

    async def _probe(self) -> float:
        """Return the latency of a small request in seconds; infinite if it is refused."""
        began = time.monotonic()
        response = await self._post()
        return time.monotonic() - began if response.is_success else float("inf")

    async def _retry_afters(self, seconds: float) -> list[int]:
        """Send a request each second during the overload; return the ``Retry-After`` of refusals.

        Raises:
            AssertionError: if a refusal is not a 429 with ``Retry-After``.
        """
        until = time.monotonic() + seconds
        found = list[int]()
        while time.monotonic() < until:
            response = await self._post()
            if not response.is_success:
                assert response.status_code == httpx.codes.TOO_MANY_REQUESTS, response.text
                found.append(int(response.headers["retry-after"]))
            await asyncio.sleep(1)
        return found

    async def _recovery(self, seconds: float, usual_s: float) -> float:
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        while time.monotonic() < ended + RECOVERY_LIMIT_S:
            if await self._probe() <= RECOVERED * usual_s:
                return time.monotonic() - ended
            await asyncio.sleep(PROBE_GAP_S)
        return float("inf")


def show(result: Seed) -> None:
    """Print the figures of one seed."""
    table = Table("run", "tenant", "accepted", "429", "failed", "p50 s", "p90 s", "p99 s")
    for name in ("429 p99 s", "lag p99 s"):
        table.add_column(name)
    table.title = f"seed {result.seed}"
    for name in ("alone", "capacity", "overload"):
        run: Run = getattr(result, name)
        for tenant, latencies in run.percentiles.items():
            counts = (run.accepted[tenant], run.refused[tenant], run.failed[tenant])
            seconds = (*latencies, run.refusal_p99_s, run.lag_p99_s)
            table.add_row(name, tenant, *map(str, counts), *(f"{one:.3f}" for one in seconds))
    console.print(table)
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in result.ratios.items())
    console.print(f"{ratios}; Retry-After of probes: {sorted(set(result.retry_after_s))} s")


def main() -> None:
    own = _options()
    lengths = Lengths(tuple(own.prompt), tuple(own.output))
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
        keys.write_text("".join(f"{digest} {name}\n" for name, digest in digests.items()))
        environment = {"HEADRACE_GATEWAY_API_KEYS_FILE": str(keys)}
        for role in ("PREFILL", "DECODE"):
            environment[f"HEADRACE_{role}_MAX_RUNNING"] = str(own.batch)
        with deployed(*own.up, environment=environment, api_key=KEYS[OTHER], sheds=True) as running:
            running.wait_for_all_workers()
            bench = Bench(running, lengths)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
                capacity = own.capacity or loop.run(bench.capacity())
                console.print(f"capacity: {capacity:.2f} requests/s")
                results = []
                for seed in own.seeds:
                    result = loop.run(bench.measure(capacity, own.load, own.accepted, seed))
                    results.append(result)
                    show(result)
    for name, bound in BOUNDS.items():
        found = median(result.ratios[name] for result in results)
        console.print(
            f"{name}: median {found:.2f}, bound {bound}: {'met' if found <= bound else 'not met'}"
        )
    if own.json:
        document = {"capacity": capacity, "seeds": [asdict(result) for result in results]}
        own.json.write_text(json.dumps(document, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.overload")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--load", type=float, default=3.0, help="multiple of the capacity")
    parser.add_argument("--accepted", type=int, default=500, help="answers of a run")
    parser.add_argument("--capacity", type=float, help="requests/s; default: found first")
    parser.add_argument("--batch", type=int, default=8, help="batch slots of each worker")
    parser.add_argument("--prompt", type=int, nargs=2, default=[16, 48], help="tokens, from and to")
    parser.add_argument("--output", type=int, nargs=2, default=[8, 24], help="tokens, from and to")
    parser.add_argument(
        "--up", nargs="*", default=[], help="flags of headrace up, after the others"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
