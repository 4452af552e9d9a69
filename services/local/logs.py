"""Logs of the processes of a deployment: opened for appending, limited in size, and followed."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import structlog

log = structlog.get_logger()

POLL_S = 0.1
"""Time between two reads of what was added to logs, seconds."""


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending; if that fails, for example on a full disk, discard its lines."""
    try:
        return path.open("ab")
    except OSError as error:
        log.warning("log not opened", path=str(path), error=str(error))
        return Path(os.devnull).open("ab")


def previous_log(path: Path) -> Path:
    """Return the file that has the earlier part of a log, or the log of the last deployment."""
    return path.with_suffix(".log.1")


def rotate(path: Path, max_bytes: int) -> None:
    """Move the content of a log of more than ``max_bytes`` to `previous_log`.

    The process that writes keeps its file, so the content is copied and the file truncated. Lines
    that are written in between are lost, and so is the content if there is no space for a copy.

    Raises:
        OSError: if the log cannot be truncated.
    """
    if not path.is_file() or path.stat().st_size <= max_bytes:
        return
    previous = previous_log(path)
    try:
        previous.unlink(missing_ok=True)
        shutil.copyfile(path, previous)
    except OSError as error:
        log.warning("log not kept", path=str(path), error=str(error))
        previous.unlink(missing_ok=True)
    os.truncate(path, 0)


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log, or why it cannot be read."""
    try:
        content = path.read_text(errors="replace")
    except OSError as error:
        return f"(it cannot be read: {error})"
    return "\n".join(content.splitlines()[-lines:])


async def poll_periodically(poll: Callable[[], None]) -> None:
    """Call ``poll``, which reads what was added to logs, every `POLL_S` until cancelled."""
    while True:
        poll()
        await asyncio.sleep(POLL_S)


class LogFollower:
    """Reads the events that a process appends to its log.

    Logs must be JSON, which is the default of services whose output is not a terminal; other lines
    are ignored.

    Args:
        path: log file. A file that does not exist yet is empty.
        at_end: whether to ignore what the log contains already.
    """

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if at_end and path.is_file() else 0

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the complete lines that were added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError:
            return
        complete = added[: added.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
