"""Interface of measures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.record import Record


@dataclass(frozen=True)
class Window:
    """Measured part of a run, without warm-up and cool-down. Times are seconds after the start.

    It is empty if nothing of that part ran.
    """

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def rate(self, total: float) -> float:
        """Return the rate per second of a total over the window; 0 for an empty window."""
        return total / self.seconds if self.seconds else 0.0

    def has(self, at: float) -> bool:
        return self.begin <= at < self.end

    def due(self, records: Sequence[Record]) -> list[Record]:
        """Return the records that were sent and whose scheduled time is in the window."""
        return [record for record in records if record.sent is not None and self.has(record.due)]


@dataclass(frozen=True)
class Measure:
    """A measure with zero or more values per request.

    Attributes:
        name: name in JSON and on the command line.
        title: title in reports.
        unit: unit of the values, always "s".
        formula: formula shown in reports.
        of: function from a record to its values.
    """

    name: str
    title: str
    unit: str
    formula: str
    of: Callable[[Record], Sequence[float]]
