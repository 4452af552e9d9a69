"""Goodput: requests a second that succeeded within all of some targets.

A request meets targets if each of its numbers of each measure is at most the target's. Of all that
were due, those that failed or were never answered count as not met; clients that left do not count.
Attainment is the share that met them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from loadgen.measures.base import Measure, Window
from loadgen.record import Record


@dataclass(frozen=True)
class Objective:
    """Seconds that a measure may be at most."""

    measure: Measure
    seconds: float

    def met_by(self, record: Record) -> bool:
        return all(value <= self.seconds for value in self.measure.of(record))


@dataclass(frozen=True)
class Goodput:
    """``requests`` a second that met all objectives, and the share of those due that did."""

    requests: float
    attainment: float

    @classmethod
    def of(cls, records: Sequence[Record], window: Window, objectives: Sequence[Objective]) -> Self:
        due = [record for record in window.due(records) if not record.cancelled]
        good = sum(
            record.succeeded and all(objective.met_by(record) for objective in objectives)
            for record in due
        )
        return cls(good / window.seconds, good / len(due) if due else 0.0)
