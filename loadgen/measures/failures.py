"""Failures: how many requests failed, and how; and what became of the others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from loadgen.measures.base import Window
from loadgen.record import Failure, Record


@dataclass(frozen=True)
class Outcomes:
    """Of the requests due in a window; each is one of these.

    Attributes:
        succeeded: with all of their answer.
        cancelled: their clients left on purpose.
        unfinished: the run was stopped before they ended, or before they were sent.
        failed: by how they failed.
    """

    succeeded: int
    cancelled: int
    unfinished: int
    failed: dict[Failure, int]

    @classmethod
    def of(cls, records: Sequence[Record], window: Window) -> Self:
        due = [record for record in records if window.has(record.due)]
        failed = Counter(record.failure for record in due if record.failure is not None)
        return cls(
            succeeded=sum(record.succeeded for record in due),
            cancelled=sum(record.cancelled for record in due),
            unfinished=sum(record.ended is None for record in due),
            failed={failure: failed[failure] for failure in Failure if failed[failure]},
        )

    @property
    def total(self) -> int:
        return self.succeeded + self.cancelled + self.unfinished + sum(self.failed.values())
