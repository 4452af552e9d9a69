"""Time from the start of the first of several pieces of work to the end of the last one."""

import math
from dataclasses import dataclass


@dataclass
class Interval:
    """Smallest interval that contains all pieces of work, in seconds of `time.perf_counter`."""

    start: float = math.inf
    end: float = -math.inf

    def add(self, start: float, end: float) -> None:
        """Extend the interval by a piece of work."""
        self.start = min(self.start, start)
        self.end = max(self.end, end)
