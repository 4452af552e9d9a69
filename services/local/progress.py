"""Progress of the workers' start-up, read from their logs, for the terminal of `headrace up`."""

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

_PERIOD_S = 0.2
_STAGES = {
    "reading checkpoint": "reading weights",
    "checkpoint read": "copying weights to the device",
    "sizes": "warming up",
    "warmed up": "warming up, {stage}",
    "kv pages": "preparing transfers",
    "ready": "ready",
}
"""Stage that begins with each event of a worker's log, with fields of the event."""


class StartProgress:
    """Follows the logs of workers, and prints the stage that each of them has reached.

    On a terminal, one line shows all workers. Otherwise a line is printed for each new stage. Logs
    must be JSON, which is the default of services whose output is not a terminal; other lines are
    ignored.

    Args:
        logs: log file of each worker, by name. A file that does not exist yet is empty.
        console: console to print to.
        status: the console's status line, which is updated on a terminal.
    """

    def __init__(self, logs: dict[str, Path], console: Console, status: Status) -> None:
        self._logs, self._console, self._status = logs, console, status
        self._began = time.monotonic()
        self._stages = dict.fromkeys(logs, "starting")
        self._offsets = dict.fromkeys(logs, 0)

    async def follow(self) -> None:
        """Print progress until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.poll()

    def poll(self) -> None:
        """Read what was added to the logs, and print new stages."""
        for name, path in self._logs.items():
            for event in self._new_events(name, path):
                stage = _stage_of(event)
                if stage is not None and stage != self._stages[name]:
                    self._stages[name] = stage
                    if not self._console.is_terminal:
                        seconds = time.monotonic() - self._began
                        self._print(f"{seconds:6.1f} s  {name}: {stage}")
        if self._console.is_terminal:
            seconds = time.monotonic() - self._began
            stages = "; ".join(f"{name}: {stage}" for name, stage in self._stages.items())
            self._status.update(f"{seconds:.0f} s, {stages}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _new_events(self, name: str, path: Path) -> Iterable[dict[str, Any]]:
        """Yield the events of the complete lines that were added to a log."""
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[name])
                added = file.read()
        except OSError:
            return
        complete = added[: added.rfind(b"\n") + 1]
        self._offsets[name] += len(complete)
        for line in complete.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def _stage_of(event: dict[str, Any]) -> str | None:
    """Return the stage that begins with an event; None if it begins none."""
    try:
        return _STAGES[event["event"]].format_map(event)
    except (KeyError, TypeError):
        return None
