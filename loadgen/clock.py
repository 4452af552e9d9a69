"""The one clock of a run."""

import time


class Clock:
    """Seconds since its start, monotonic; `time.monotonic` is the same for all processes of a
    machine, so that what a server logged can be compared."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.started

    def restart(self) -> None:
        """0 is now."""
        self.started = time.monotonic()
