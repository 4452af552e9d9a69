"""Time since a thread or a process made progress."""

import math
import time
from collections.abc import Callable

from services.common.process_stat import ProcessStat


class Stall:
    """Measures how long a thread, or a process, has made no progress.

    On a CPU, it makes progress if it has used processor time since the previous measurement: on a
    slow or busy machine, a step takes minutes. On a GPU, processor time of a step is ignored,
    because a thread that waits for a device that hangs uses it, too.

    Args:
        task: returns the folder of the thread or of the process in ``/proc``.
        by_processor: whether the use of processor time is progress.
        pause_s: maximum time between two measurements that counts. More is time in which this
            process was stopped, too, as in a container that is paused.
    """

    def __init__(
        self, task: Callable[[], str], *, by_processor: bool, pause_s: float = math.inf
    ) -> None:
        self._task = task
        self._by_processor = by_processor
        self._pause_s = pause_s
        self._used_s = 0.0
        self._used_at = self._measured_at = -math.inf
        self._paused_s = 0.0  # in the current stall

    def seconds(self, step_s: float) -> float:
        """Return the seconds since there was progress; to be called periodically.

        Args:
            step_s: seconds since the current step began; 0 without a step.
        """
        now = time.perf_counter()
        if self._by_processor:
            used_s = _processor_s(self._task())
            if used_s != self._used_s:
                self._used_s = used_s
                self._used_at = now
        stalled_s = min(step_s, now - self._used_at)
        unobserved_s = now - self._measured_at
        self._measured_at = now
        if stalled_s < unobserved_s:  # it began after the previous measurement
            unobserved_s = stalled_s
            self._paused_s = 0.0
        self._paused_s += max(0.0, unobserved_s - self._pause_s)
        return stalled_s - self._paused_s


def _processor_s(task: str) -> float:
    """Return the processor time that a thread or a process has used, in seconds; 0 if it ended."""
    stat = ProcessStat.of(task)
    return 0.0 if stat is None else stat.processor_s
