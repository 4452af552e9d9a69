"""What a run comes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from loadgen.measures import (
    LAG,
    MEASURES,
    Goodput,
    InFlight,
    Objective,
    Outcomes,
    Throughput,
    Window,
)
from loadgen.record import Record
from loadgen.statistics import PERCENTILES, Distribution

MOST_LAG_S = 0.01
"""By which 99 of 100 requests may be sent late, for a run to count."""
_LAG_PERCENTILE = 99.0


@dataclass(frozen=True)
class Summary:
    """Of one run.

    Attributes:
        window: the part that counts.
        throughput, outcomes, in_flight: see there.
        goodput: None: no objectives were named.
        measures: by name; None: no request has a number of it.
        invalid: why it says nothing of the target; None: it does.
    """

    window: Window
    throughput: Throughput
    outcomes: Outcomes
    in_flight: InFlight
    goodput: Goodput | None
    measures: dict[str, Distribution | None]
    invalid: str | None

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        window: Window,
        objectives: Sequence[Objective] = (),
        *,
        most_lag_s: float = MOST_LAG_S,
    ) -> Self:
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
            invalid=_invalid(measures[LAG.name], most_lag_s),
        )

    def as_json(self) -> dict[str, Any]:
        """Numbers in seconds, and requests and tokens a second."""
        return {
            "invalid": self.invalid,
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
        }


def _as_json(found: Distribution) -> dict[str, float]:
    named = {
        f"p{which:g}": value for which, value in zip(PERCENTILES, found.percentiles, strict=True)
    }
    return {
        "count": found.count,
        "mean": found.mean,
        "deviation": found.deviation,
        "min": found.least,
        **named,
        "max": found.most,
    }


def _invalid(lag: Distribution | None, most_s: float) -> str | None:
    if lag is None:
        return "no request was sent in the window"
    late_s = lag.percentile(_LAG_PERCENTILE)
    if late_s <= most_s:
        return None
    return (
        f"the generator was late: 1 of 100 requests was sent {1e3 * late_s:.1f} ms or more after "
        f"its time, and {1e3 * most_s:g} ms are allowed"
    )
