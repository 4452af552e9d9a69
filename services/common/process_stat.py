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
        exit_code: exit code, or minus the signal number, as soon as the process begins to exit;
            None before. Exiting takes seconds if a driver must free the memory of a GPU. Until it
            is done, the parent cannot reap the process, and some of its pipes stay open.
        zombie: whether the process has exited.
        session: session id.
        processor_s: processor time that was used, seconds.
        started_s: start time, seconds since the boot of the system.
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
        # Fields from number 3 on. Field 2, in parentheses, may contain spaces.
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
