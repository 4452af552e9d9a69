"""Goodput: rate of successful requests that met all objectives, per second.

A request meets an objective if none of its values of the objective's measure exceeds the bound.
Failed and unanswered requests count as not meeting the objectives, and so do turns of chats that
were not sent after a failed turn. Cancelled requests are not
counted. Attainment is the fraction of the counted requests that met all objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from loadgen.measures.base import Measure, Window
from loadgen.record import Record


@dataclass(frozen=True)
class Objective:
    """Upper bound on a measure, in seconds."""

    measure: Measure
    seconds: float

    def met_by(self, record: Record) -> bool:
        return all(value <= self.seconds for value in self.measure.of(record))


@dataclass(frozen=True)
class Goodput:
    """Goodput and attainment of one run.

    Attributes:
        requests: successful requests that met all objectives, per second.
        attainment: fraction of the requests scheduled in the window, except cancelled ones, that
            met all objectives.
    """

    requests: float
    attainment: float

    @classmethod
    def of(cls, records: Sequence[Record], window: Window, objectives: Sequence[Objective]) -> Self:
        due = [
            record
            for record in records
            if window.has(record.due)
            and (record.sent is not None or record.failure is not None)
            and not record.cancelled
        ]
        good = sum(
            record.succeeded and all(objective.met_by(record) for objective in objectives)
            for record in due
        )
        return cls(window.rate(good), good / len(due) if due else 0.0)
