"""Whether a thread or a process makes progress."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path


class Stall:
    """Measures how long a thread, or a process, has made no progress.

    On a CPU, it makes progress if it has used processor time since the previous measurement: on a
    slow or busy machine, a step takes minutes. On a GPU, processor time of a step is ignored,
    because a thread that waits for a device that hangs uses it, too.

    Args:
        task: returns the folder of the thread or of the process in ``/proc``.
        by_processor: whether the use of processor time is progress.
    """

    def __init__(self, task: Callable[[], str], *, by_processor: bool) -> None:
        self._task = task
        self._by_processor = by_processor
        self._used_s = 0.0
        self._used_at = -math.inf

    def seconds(self, step_s: float) -> float:
        """Return the seconds since there was progress; to be called periodically.

        Args:
            step_s: seconds since the current step began; 0 without a step.
        """
        if self._by_processor:
            used_s = _processor_s(self._task())
            if used_s != self._used_s:
                self._used_s = used_s
                self._used_at = time.perf_counter()
        return min(step_s, time.perf_counter() - self._used_at)


def _processor_s(task: str) -> float:
    """Return the processor time that a thread or a process has used, in seconds; 0 if it ended."""
    try:
        stat = Path("/proc", task, "stat").read_text()
    except OSError:
        return 0.0
    # Fields 14 and 15 of proc(5). Field 2, in parentheses, may contain spaces.
    user, system = stat[stat.rindex(")") + 1 :].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
