"""Summary of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from loadgen.measures import (
    LAG,
    MEASURES,
    Cached,
    Goodput,
    InFlight,
    Objective,
    Outcomes,
    Throughput,
    Turn,
    Window,
    turns_of,
)
from loadgen.record import Record
from loadgen.statistics import PERCENTILES, Distribution
from loadgen.validity import MAX_LAG_S, Invalid, invalid


@dataclass(frozen=True)
class Summary:
    """Summary of one run.

    Attributes:
        window: measured part of the run.
        goodput: goodput and attainment; None without objectives.
        measures: distributions by measure name; None for a measure without values.
        invalid: why the run is invalid, or None.
        concurrency: requests or chats in flight of a closed loop; None for an open loop.
        cached: prompt tokens from the target's prefix cache; None if it does not report them.
        turns: requests of chats by turn; empty without chats.
    """

    window: Window
    throughput: Throughput
    outcomes: Outcomes
    in_flight: InFlight
    goodput: Goodput | None
    measures: dict[str, Distribution | None]
    invalid: Invalid | None
    concurrency: int | None = None
    cached: Cached | None = None
    turns: tuple[Turn, ...] = ()

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        window: Window,
        objectives: Sequence[Objective] = (),
        *,
        max_lag_s: float = MAX_LAG_S,
        concurrency: int | None = None,
        cores: float | None = None,
    ) -> Self:
        """Summarize the requests of a run that are due in the window.

        Args:
            max_lag_s: p99 dispatch lag above which the run is invalid.
            cores: CPU time of the load generator, divided by the duration of the run.
        """
        due = window.due(records)
        measures = {
            measure.name: Distribution.of([value for one in due for value in measure.of(one)])
            for measure in MEASURES
        }
        return cls(
            window=window,
            throughput=Throughput.of(records, window),
            outcomes=Outcomes.of(records, window),
            in_flight=InFlight.of(records, window),
            goodput=Goodput.of(records, window, objectives) if objectives else None,
            measures=measures,
            invalid=invalid(
                measures[LAG.name], max_lag_s, cores=cores, closed=concurrency is not None
            ),
            concurrency=concurrency,
            cached=Cached.of(due),
            turns=turns_of(records, window),
        )

    @property
    def arrivals(self) -> float:
        """Requests per second that were due; with chats, their first turns per second."""
        if not self.turns:
            return self.throughput.offered
        return self.window.rate(sum(one.sent for one in self.turns if one.turn == 1))

    def as_json(self) -> dict[str, Any]:
        """Return the summary document. Units are seconds, and requests or tokens per second."""
        return {
            "invalid": self.invalid and self.invalid.reason,
            "remedy": self.invalid and self.invalid.remedy,
            "concurrency": self.concurrency,
            "window": vars(self.window),
            "throughput": vars(self.throughput),
            "outcomes": {
                "total": self.outcomes.total,
                "succeeded": self.outcomes.succeeded,
                "cancelled": self.outcomes.cancelled,
                "unfinished": self.outcomes.unfinished,
                "failed": {str(kind): count for kind, count in self.outcomes.failed.items()},
            },
            "in_flight": vars(self.in_flight),
            "goodput": None if self.goodput is None else vars(self.goodput),
            "measures": {name: found and _as_json(found) for name, found in self.measures.items()},
            "arrivals": self.arrivals,
            "cached": self.cached and vars(self.cached),
            "turns": [_turn_as_json(turn) for turn in self.turns],
        }


def _turn_as_json(turn: Turn) -> dict[str, Any]:
    return vars(turn) | {
        "ttft": turn.ttft and _as_json(turn.ttft),
        "cached": turn.cached and vars(turn.cached),
    }


def _as_json(found: Distribution) -> dict[str, float]:
    named = {
        f"p{which:g}": value for which, value in zip(PERCENTILES, found.percentiles, strict=True)
    }
    return {
        "count": found.count,
        "mean": found.mean,
        "deviation": found.deviation,
        "min": found.minimum,
        **named,
        "max": found.maximum,
    }
