"""Logs of the processes of a deployment: opened for appending, and limited in size."""

import os
import shutil
from pathlib import Path
from typing import BinaryIO

import structlog

log = structlog.get_logger()


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
