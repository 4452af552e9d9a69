"""Processes that a service leaves behind: those of its session that outlive it."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import structlog

from services.common.process_stat import ProcessStat

log = structlog.get_logger()

GRACE_S = 1.0
"""Time in which processes end by themselves, as ranks and Python's resource tracker do, seconds."""
LIMIT_S = 10.0
"""Maximum time in which they end, seconds."""
_POLL_S = 0.02


async def end_session(leader: int) -> None:
    """Wait for the processes of a session whose leader has ended; kill them after `GRACE_S`.

    Ranks of a worker that was killed are such processes. When this returns, their memory is free,
    also that of GPUs.

    Args:
        leader: id of the process that led the session.
    """
    began = time.monotonic()
    while left := _members(leader):
        waited_s = time.monotonic() - began
        if waited_s > LIMIT_S:
            log.warning("processes do not end", pids=left)
            return
        if waited_s > GRACE_S:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(_POLL_S)


def _members(leader: int) -> list[int]:
    """Return the processes of a session without its leader. Zombies do not count.

    If a process has the id of the leader, that id was assigned again, so the session has ended.
    """
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        stat = ProcessStat.of(folder.name)
        if stat is not None and stat.session == leader and not stat.zombie:
            members.append(int(folder.name))
    return [] if leader in members else members
