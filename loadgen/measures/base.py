"""What a measure is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.record import Record


@dataclass(frozen=True)
class Window:
    """The part of a run that counts, without its warm-up and cool-down: seconds after the start."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def has(self, at: float) -> bool:
        return self.begin <= at < self.end

    def due(self, records: Sequence[Record]) -> list[Record]:
        """Whose times are in it, and which were sent."""
        return [record for record in records if record.sent is not None and self.has(record.due)]


@dataclass(frozen=True)
class Measure:
    """Something that each request has a number of, or some.

    Attributes:
        name: in JSON and on the command line.
        title: in reports.
        unit: "s".
        of: its numbers of one request; none where it has none.
        formula: for readers of a report.
    """

    name: str
    title: str
    unit: str
    formula: str
    of: Callable[[Record], Sequence[float]]
