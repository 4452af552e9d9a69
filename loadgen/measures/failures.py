"""Outcomes: number of requests that succeeded, failed, were cancelled or did not finish."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from loadgen.measures.base import Window
from loadgen.number import counted
from loadgen.record import Failure, Record


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of the requests scheduled in a window; each request is counted exactly once.

    Attributes:
        succeeded: requests with a complete answer.
        cancelled: requests cancelled by their clients.
        unfinished: requests not sent or not ended when the run was stopped.
        failed: number of failed requests by kind of failure.
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


def failures_in_words(failed: Mapping[str, int]) -> str:
    """Return failed requests by kind, the most frequent first, or "" if there are none."""
    if not failed:
        return ""
    kinds = sorted(failed.items(), key=lambda kind: -kind[1])
    words = ", ".join(f"{count:,} {Failure(kind).words}" for kind, count in kinds)
    return f"{counted(sum(failed.values()), 'request')} failed: {words}"
