"""Search for the highest rate at which enough requests meet their objectives."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.cases.load import Traffic, run_at

_MAX_RATE, _MIN_RATE = 1e4, 0.1
SETTLE_S = 2.0
"""Seconds in which a system must free what cancelled requests used."""


@dataclass
class Bracket:
    """Highest rate that passed and lowest rate that failed; None before there is one."""

    passed: float | None = None
    failed: float | None = None

    def next(self, start: float, tolerance: float) -> float | None:
        """Return the next rate to measure, or None if the search is complete.

        The rate doubles until one fails, or halves until one passes. Then the interval between both
        is bisected on a logarithmic scale.

        Args:
            start: first rate.
            tolerance: relative width of the interval at which the search ends, such as 0.05.
        """
        if self.passed is None and self.failed is None:
            return start
        if self.failed is None:
            assert self.passed is not None
            return self.passed * 2 if self.passed < _MAX_RATE else None
        if self.passed is None:
            return self.failed / 2 if self.failed > _MIN_RATE else None
        if self.failed / self.passed <= 1 + tolerance:
            return None
        return float(f"{(self.passed * self.failed) ** 0.5:.4g}")

    def add(self, rate: float, passes: bool) -> None:
        """Narrow the bracket by a measured rate."""
        if passes:
            self.passed = max(rate, self.passed or 0.0)
        else:
            self.failed = min(rate, self.failed or rate)


def search(
    passes: Callable[[float], bool], start: float, tolerance: float, most: int = 16
) -> Iterator[tuple[float, Bracket]]:
    """Measure rates until the bracket is narrow enough; yield each rate and the bracket after it.

    Args:
        passes: measures a rate and returns whether enough requests met their objectives.
        most: maximum number of rates.
    """
    bracket = Bracket()
    for _ in range(most):
        rate = bracket.next(start, tolerance)
        if rate is None:
            return
        bracket.add(rate, passes(rate))
        yield rate, bracket


@dataclass(frozen=True)
class Search:
    """Highest Poisson rate within objectives, by bisection over short runs.

    Every system and every rate gets the same seeds. A rate passes if the mean attainment over the
    seeds is at least ``attain``, and no run is so far below it that it ends early.

    Attributes:
        answers: answer lengths in tokens; one search for each.
        start: first rate, in requests per second.
        tolerance: relative width of the bracket at which the search ends.
        attain: fraction of requests that must meet both objectives.
        seeds: seeds of the runs at each rate.
    """

    answers: tuple[int, ...] = (128, 512)
    start: float = 8.0
    tolerance: float = 0.05
    attain: float = 0.95
    seeds: tuple[int, ...] = (0,)
    traffic: Traffic = field(default_factory=Traffic)
    name: str = "search"

    def rows(self, context: Context) -> Iterator[Row]:
        for answer in self.answers:
            yield from self._search(context, answer)

    def _search(self, context: Context, answer: int) -> Iterator[Row]:
        """Yield one row for each rate; the last row has the result."""
        measured: list[Row] = []

        def passes(rate: float) -> bool:
            row = self._probe(context, rate, answer)
            measured.append(row)
            early = ", ended early" if row["gave_up"] else ""
            context.console.print(
                f"  search, answers of {answer} tokens: {rate:g} {self.traffic.unit}, "
                f"{row['attainment']:.1%} within objectives{early}"
            )
            return not row["gave_up"] and bool(row["attainment"] >= self.attain)

        for _, bracket in search(passes, self.start, self.tolerance):
            best = [row["goodput"] for row in measured if row["rate"] == bracket.passed]
            yield measured[-1] | {
                "passed": bracket.passed,
                "failed": bracket.failed,
                "passed_goodput": best[-1] if best else None,
            }

    def _probe(self, context: Context, rate: float, answer: int) -> Row:
        """Measure one rate. A run ends early if too many of its requests have missed.

        The attainment of such a run is that of the requests sent until then.
        """
        runs = []
        for seed in self.seeds:
            runs.append(run_at(context, self.traffic, rate, answer, seed, give_up=self.attain))
            if runs[-1]["gave_up"]:
                time.sleep(SETTLE_S)
                break
        goodputs = [one["summary"]["goodput"] for one in runs]
        attained = sum(one["attainment"] for one in goodputs) / len(runs)
        gave_up = any(one["gave_up"] for one in runs)
        return {
            "answer": answer,
            "rate": rate,
            "shape": self.traffic.shape,
            "attainment": attained,
            "goodput": sum(one["requests"] for one in goodputs) / len(runs),
            "gave_up": gave_up,
            "runs": runs,
        }
