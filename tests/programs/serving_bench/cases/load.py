"""Poisson load at given rates."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from loadgen.config import ArrivalConfig, RunConfig, WorkloadConfig
from loadgen.measures import BY_NAME, Objective
from loadgen.run import run
from loadgen.schedule import Limits
from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.counters import MetricsReader, stages


@dataclass(frozen=True)
class Traffic:
    """Requests of a run with Poisson arrivals.

    Attributes:
        inputs: distribution of prompt lengths, in the syntax of the load generator.
        seconds: duration of arrivals.
        warm_up_s: seconds at the start that are not measured, in addition to ``seconds``.
        ttft_s, tpot_s: objectives of each request.
    """

    inputs: str = "lognormal:1000,0.6"
    seconds: float = 20.0
    warm_up_s: float = 3.0
    ttft_s: float = 0.4
    tpot_s: float = 0.008

    @property
    def objectives(self) -> tuple[Objective, ...]:
        bounds = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return tuple(Objective(BY_NAME[name], seconds) for name, seconds in bounds.items())


def run_at(
    context: Context,
    traffic: Traffic,
    rate: float,
    answer: int,
    seed: int,
    give_up: float | None = None,
    hang_up: bool = False,
) -> Row:
    """Run the load generator and return the row of one run.

    Args:
        rate: requests per second, over all replicas.
        answer: answer length in tokens.
        give_up: attainment without which the run may end early.
        hang_up: whether all clients hang up when the arrivals end.

    Raises:
        UsageError: if the server cannot be measured.
        KeyboardInterrupt: if the user interrupts the run.
    """
    duration_s = traffic.warm_up_s + traffic.seconds
    config = RunConfig(
        context.server.target,
        WorkloadConfig(inputs=traffic.inputs, outputs=f"fixed:{answer}", token_ids=True),
        ArrivalConfig(rate=rate),
        Limits(duration_s=duration_s),
        model=context.server.model,
        tokenizer=context.server.tokenizer,
        seed=seed,
        timeout_s=max(1.0, context.limit_s - duration_s),
        ignore_eos=True,
        warm_up_s=traffic.warm_up_s,
        objectives=traffic.objectives,
        give_up=give_up,
        hang_up=hang_up,
        max_lag_s=context.max_lag_s,
    )
    metrics = MetricsReader(context.server.metrics)
    outcome = run(config, context.console)
    if outcome.stopped:
        raise KeyboardInterrupt
    if context.records is not None:
        outcome.write(context.records / f"answer-{answer}-rate-{rate:g}-seed-{seed}")
    collected = metrics.collect()
    summary: dict[str, Any] = {key: outcome.document[key] for key in KEPT}
    return {
        "answer": answer,
        "rate": rate,
        "seed": seed,
        "gave_up": outcome.gave_up,
        "summary": summary,
        "stages": stages(collected),
        "metrics": collected,
    }


KEPT = (
    *("invalid", "window", "throughput", "outcomes", "in_flight", "goodput", "measures"),
    *("objectives", "generator", "lengths"),
)
"""Parts of the load generator's summary that a row has."""


@dataclass(frozen=True)
class Load:
    """Poisson load at several rates.

    Attributes:
        rates: requests per second.
        answers: answer lengths in tokens.
        seeds: seeds of the runs at each rate.
    """

    rates: tuple[float, ...] = (4.0, 12.0, 24.0)
    answers: tuple[int, ...] = (128,)
    seeds: tuple[int, ...] = (0,)
    traffic: Traffic = field(default_factory=Traffic)
    name: str = "load"

    def rows(self, context: Context) -> Iterator[Row]:
        for answer in self.answers:
            for rate in self.rates:
                for seed in self.seeds:
                    context.console.print(
                        f"  load of {rate:g} requests/s, answers of {answer} tokens, seed {seed}"
                    )
                    yield run_at(context, self.traffic, rate, answer, seed)
