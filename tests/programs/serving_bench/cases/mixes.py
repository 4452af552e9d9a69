"""Closed loops with the length mixes of the FDC paper, scaled to a number of tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.config import ArrivalConfig, RunConfig, WorkloadConfig
from loadgen.run import run
from loadgen.schedule import Limits
from loadgen.workload import PRESETS
from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.cases.load import KEPT
from tests.programs.serving_bench.counters import MetricsReader, stages, total

MIXES = tuple(PRESETS)


def scale_of(mix: str, tokens: int) -> float:
    """Return the scale at which a mean request of a mix has ``tokens`` prompt and output tokens.

    Prompts and outputs keep their ratio.
    """
    named = PRESETS[mix]
    return tokens / (named.inputs.mean + named.outputs.mean)


@dataclass(frozen=True)
class Mixes:
    """Closed loops of requests whose lengths are those of datasets (FDC, Table 6), scaled.

    Attributes:
        mixes: names of presets of the load generator.
        tokens: prompt and output tokens of a mean request, the same for all mixes.
        concurrency: numbers of requests in flight; one run for each.
        requests: requests of a run for each one in flight.
        seed: seed of lengths and prompts.
    """

    mixes: tuple[str, ...] = MIXES
    tokens: int = 4096
    concurrency: tuple[int, ...] = (16, 64)
    requests: int = 4
    seed: int = 0
    name: str = "mixes"

    def rows(self, context: Context) -> Iterator[Row]:
        for mix in self.mixes:
            for concurrency in self.concurrency:
                context.console.print(f"  {mix}, {concurrency} requests in flight")
                yield self._run(context, mix, concurrency)

    def _run(self, context: Context, mix: str, concurrency: int) -> Row:
        scale = scale_of(mix, self.tokens)
        config = RunConfig(
            context.server.target,
            WorkloadConfig(preset=mix, scale=scale, token_ids=True, variant=next(context.variants)),
            ArrivalConfig(),
            Limits(requests=self.requests * concurrency),
            concurrency=concurrency,
            model=context.server.model,
            tokenizer=context.server.tokenizer,
            seed=self.seed,
            timeout_s=context.limit_s,
            ignore_eos=True,
            max_lag_s=context.max_lag_s,
        )
        metrics = MetricsReader(context.server.metrics)
        outcome = run(config, context.console)
        if outcome.stopped:
            raise KeyboardInterrupt
        if context.records is not None:
            outcome.write(context.records / f"{mix}-{concurrency}")
        collected = metrics.collect()
        return {
            "mix": mix,
            "tokens": self.tokens,
            "scale": scale,
            "concurrency": concurrency,
            "summary": {key: outcome.document[key] for key in KEPT},
            "stages": stages(collected),
            "wire_bytes_per_token": wire_bytes_per_token(collected),
            "p99": metrics.quantiles(0.99),
            "metrics": collected,
        }


def wire_bytes_per_token(metrics: Mapping[str, Any]) -> float | None:
    """Return the bytes sent per token of transferred sequences; None without transfers."""
    tokens = total(metrics, "headrace_kv_transfer_tokens_total", "decode")
    sent = total(metrics, "headrace_kv_transfer_bytes_total", "decode", kind="wire")
    return sent / tokens if tokens else None
