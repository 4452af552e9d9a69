"""Clock of a run."""

import time


class Clock:
    """Monotonic seconds since the start.

    All processes of a machine share `time.monotonic`, so times are comparable with a server's log.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.started

    def restart(self) -> None:
        """Set the time to 0."""
        self.started = time.monotonic()
