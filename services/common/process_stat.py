"""State of a process or a thread, from ``/proc``."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_EXITING = 0x4
"""The flag ``PF_EXITING`` of Linux."""


@dataclass(frozen=True)
class ProcessStat:
    """Fields of a ``stat`` file, see proc(5).

    Attributes:
        exit_code: exit code, negative for a signal, as soon as it begins to exit; None before. The
            exit takes seconds if a driver must free the memory of a GPU. Only then can a parent
            wait for the process, and some of its pipes are closed.
        zombie: whether it has exited.
        session: id of its session.
        processor_s: processor time that it has used, seconds.
        started_s: time at which it was started, seconds since the system was.
    """

    exit_code: int | None
    zombie: bool
    session: int
    processor_s: float
    started_s: float

    @classmethod
    def of(cls, task: str | int) -> Self | None:
        """Read the file of a process, or of a thread; return None if it does not exist.

        Args:
            task: id of a process, or its folder in ``/proc``, such as ``12/task/13``.
        """
        try:
            text = Path("/proc", str(task), "stat").read_text()
        except OSError:
            return None
        # From field 3. Field 2, in parentheses, may contain spaces.
        fields = text[text.rindex(")") + 1 :].split()
        exiting = int(fields[6]) & _EXITING
        ticks_s = os.sysconf("SC_CLK_TCK")
        return cls(
            exit_code=os.waitstatus_to_exitcode(int(fields[49])) if exiting else None,
            zombie=fields[0] in "ZX",
            session=int(fields[3]),
            processor_s=(int(fields[11]) + int(fields[12])) / ticks_s,
            started_s=int(fields[19]) / ticks_s,
        )
