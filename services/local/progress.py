"""Progress of the workers' start-up, read from their logs, for the terminal of `headrace up`."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from services.local.logs import LogFollower

_STAGES = {
    "reading checkpoint": "reading weights",
    "checkpoint read": "copying weights to the device",
    "sizes": "warming up",
    "warmed up": "warming up, {stage}",
    "kv pages": "preparing transfers",
    "ready": "ready",
}
"""Stage that begins with each event of a worker's log. Braces stand for fields of the event."""


class StartProgress:
    """Follows the logs of workers, and prints the stage that each of them has reached.

    On a terminal, one line shows all workers. Otherwise a line is printed for each new stage.

    Args:
        logs: log file of each worker, by name.
        console: console to print to.
        status: the console's status line, which is updated on a terminal.
    """

    def __init__(self, logs: dict[str, Path], console: Console, status: Status) -> None:
        self._logs = {name: LogFollower(path) for name, path in logs.items()}
        self._console = console
        self._status = status
        self._began = time.monotonic()
        self._stages = dict.fromkeys(logs, "starting")

    def poll(self) -> None:
        """Read what was added to the logs, and print new stages."""
        for name, log in self._logs.items():
            for event in log.new_events():
                stage = _stage_of(event)
                if stage is not None and stage != self._stages[name]:
                    self._stages[name] = stage
                    if not self._console.is_terminal:
                        seconds = time.monotonic() - self._began
                        line = f"{seconds:6.1f} s  {name}: {stage}"
                        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._console.is_terminal:
            seconds = time.monotonic() - self._began
            stages = "; ".join(f"{name}: {stage}" for name, stage in self._stages.items())
            self._status.update(f"{seconds:.0f} s, {stages}")


def _stage_of(event: dict[str, Any]) -> str | None:
    """Return the stage that begins with an event; None if it begins none.

    Only the first rank of a worker counts: the others pass through the same stages.
    """
    if event.get("rank"):
        return None
    try:
        return _STAGES[event["event"]].format_map(event)
    except (KeyError, TypeError):
        return None
