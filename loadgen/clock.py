"""Clock of a run."""

import time


class Clock:
    """Monotonic seconds since the start.

    `time.monotonic` is shared by all processes of a machine, so a server's log is comparable.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.started

    def restart(self) -> None:
        """Set the time to 0."""
        self.started = time.monotonic()
