"""Clock of a run."""

import time


class Clock:
    """Monotonic clock: calling it returns the seconds since the start of the run.

    All processes of a machine share `time.monotonic`. Times can therefore be compared with the log
    of a server on the same machine.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.started

    def restart(self) -> None:
        """Set the time to 0."""
        self.started = time.monotonic()
