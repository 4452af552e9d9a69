"""Progress of a stop, read from the gateways' logs: the requests that still run."""

from pathlib import Path
from typing import Self

from rich.console import Console

from services.local.logs import LogFollower


class DrainProgress:
    """Prints how many requests the gateways finish before they stop.

    Create it before the stop is requested. On a terminal, a status line is shown within the block.

    Args:
        logs: folder of the logs of a deployment.
        console: console to print to.
        hint: how a user stops the deployment without waiting, such as ``Ctrl-C to stop now``.
    """

    def __init__(self, logs: Path, console: Console, hint: str) -> None:
        paths = logs.glob("gateway*.log")
        self._followers = [LogFollower(path, at_end=True) for path in paths]
        self._requests = 0
        self._console = console
        self._hint = hint
        self._status = console.status(f"stopping, {hint}")

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def poll(self) -> None:
        """Read what was added to the logs, and print the number of requests if it has changed."""
        found = [
            event["requests"]
            for follower in self._followers
            for event in follower.new_events()
            if event.get("event") == "draining" and isinstance(event.get("requests"), int)
        ]
        if sum(found):
            self._requests += sum(found)
            plural = "s" if self._requests > 1 else ""
            self._console.print(f"draining {self._requests} request{plural}, {self._hint}")
