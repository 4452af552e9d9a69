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
        turns: distribution of the turns of chats, whose rate is that of chats; None for single
            requests.
        think_s: mean seconds from the end of an answer to the next turn.
        prefix_tokens, prefix_groups: length and number of shared prefixes or system prompts.
        cold: whether each prompt begins with unique words, so that no prefix cache holds a part.
    """

    inputs: str = "lognormal:1000,0.6"
    seconds: float = 20.0
    warm_up_s: float = 3.0
    ttft_s: float = 0.4
    tpot_s: float = 0.008
    turns: str | None = None
    think_s: float = 0.0
    prefix_tokens: int = 0
    prefix_groups: int = 1
    cold: bool = False

    @property
    def objectives(self) -> tuple[Objective, ...]:
        bounds = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return tuple(Objective(BY_NAME[name], seconds) for name, seconds in bounds.items())

    @property
    def shape(self) -> str:
        """Chats and shared prefixes, in words for titles; "" without them."""
        parts = [f"chats of {self.turns} turns"] if self.turns else []
        if self.prefix_tokens:
            groups = f" in {self.prefix_groups} groups" if self.prefix_groups > 1 else ""
            parts.append(f"{self.prefix_tokens:,} shared tokens{groups}")
        parts += ["cold"] if self.cold else []
        return ", ".join(parts)

    @property
    def unit(self) -> str:
        """Unit of rates."""
        return "chats/s" if self.turns else "requests/s"

    def workload(self, answer: int, variant: int) -> WorkloadConfig:
        """Return the workload of one run. Its prompts, also histories of chats, are token ids.

        Args:
            answer: answer length in tokens.
            variant: number of the run, so that no prefix cache holds prompts of an earlier one.
        """
        return WorkloadConfig(
            inputs=self.inputs,
            outputs=f"fixed:{answer}",
            token_ids=True,
            prefix_tokens=self.prefix_tokens,
            prefix_groups=self.prefix_groups,
            turns=self.turns,
            think_s=self.think_s,
            cold=self.cold,
            variant=variant,
        )


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
        rate: requests or chats per second, over all replicas.
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
        traffic.workload(answer, next(context.variants)),
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
        "shape": traffic.shape,
        "gave_up": outcome.gave_up,
        "summary": summary,
        "stages": stages(collected),
        "metrics": collected,
    }


KEPT = (
    *("invalid", "window", "throughput", "outcomes", "in_flight", "goodput", "measures"),
    *("objectives", "generator", "lengths", "cached", "turns"),
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
                        f"  load of {rate:g} {self.traffic.unit}, answers of {answer} tokens, "
                        f"seed {seed}"
                    )
                    yield run_at(context, self.traffic, rate, answer, seed)
