"""Overloads in which all clients hang up at once."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.programs.serving_bench.cases.base import Context, Row
from tests.programs.serving_bench.cases.load import run_at
from tests.programs.serving_bench.cases.search import SETTLE_S, Search


@dataclass(frozen=True)
class HangUps:
    """Overloads that end with a hang-up of all clients, each followed by a run at a lower rate.

    That rate is the highest one within objectives, which a search finds first. The system must have
    freed what the cancelled requests used, so that the rate is within objectives again.

    Attributes:
        search: search of the rate, for each of its answer lengths.
        overload: rate of an overload, as a multiple of that rate.
        overload_s: duration of an overload, seconds.
        rounds: number of overloads.
    """

    search: Search = field(default_factory=Search)
    overload: float = 2.0
    overload_s: float = 5.0
    rounds: int = 5
    name: str = "hang-ups"

    def rows(self, context: Context) -> Iterator[Row]:
        for answer in self.search.answers:
            passed: float | None = None
            for row in replace(self.search, answers=(answer,)).rows(context):
                passed = row["passed"]
            if passed is None:
                raise RuntimeError(f"no rate is within objectives, answers of {answer} tokens")
            for number in range(self.rounds):
                yield self._round(context, answer, passed, number)

    def _round(self, context: Context, answer: int, rate: float, number: int) -> Row:
        search = self.search
        burst = replace(search.traffic, seconds=self.overload_s, warm_up_s=0.0)
        overloaded = run_at(
            context, burst, self.overload * rate, answer, seed=1 + number, hang_up=True
        )
        time.sleep(SETTLE_S)
        run = run_at(context, search.traffic, rate, answer, search.seeds[0], give_up=search.attain)
        attainment = run["summary"]["goodput"]["attainment"]
        passes = not run["gave_up"] and attainment >= search.attain
        gone = overloaded["summary"]["outcomes"]["unfinished"]
        context.console.print(
            f"  hang-ups, round {number + 1}: {gone} clients hung up, then {rate:g} requests/s, "
            f"{attainment:.1%} within objectives"
        )
        return {
            "answer": answer,
            "rate": rate,
            "round": number + 1,
            "attainment": attainment,
            "passes": passes,
            "overload": overloaded,
            "run": run,
        }
