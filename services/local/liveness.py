"""Detection of processes that hang, from their liveness reports."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Self

from services.common.liveness import ReportPipe

PERIOD_S = 5.0
"""Time between two reports, seconds."""
SILENT_S = 60.0
"""Time without a report after which a process hangs. The thread that writes reports uses almost no
processor time, so that a process on a busy machine is not silent for that long."""
START_S = 600.0
"""The same for the first report, before which a worker reads its model and compiles kernels."""
TICK_S = 1.0


class Liveness:
    """The pipe of one process, from its start to its end. Leaving the block closes it.

    Attributes:
        pipe: end of the pipe that the process inherits.
    """

    def __init__(self) -> None:
        reports, child_end = os.pipe()
        self._reports = os.fdopen(reports, "rb", buffering=0)
        self._child_end = os.fdopen(child_end, "wb", buffering=0)
        for end in (reports, child_end):
            os.set_blocking(end, False)
        self.pipe = ReportPipe(child_end, os.fstat(child_end).st_ino, PERIOD_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.inherited()
        self._reports.close()

    def inherited(self) -> None:
        """Close this process's copy of the end that the child process has inherited."""
        self._child_end.close()

    async def silence(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> float:
        """Wait until the process hangs, and return how long it has been silent, in seconds.

        Time in which the supervisor itself does not run does not count, for example while the
        machine is suspended.
        """
        limit_s, silent_s = START_S, 0.0
        last = clock()
        while silent_s < limit_s:
            await sleep(TICK_S)
            now = clock()
            silent_s += min(now - last, 2 * TICK_S)
            last = now
            if self._reports.read(1 << 16):
                limit_s, silent_s = SILENT_S, 0.0
        return silent_s
