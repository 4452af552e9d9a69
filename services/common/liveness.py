"""Reports by which a service process shows the supervisor of `headrace up` that it works.

The supervisor gives each process a pipe. While ``/health`` succeeds, the process writes a byte to
it in each period. A process that hangs, or that is stopped, writes none. A check that raises an
exception proves no hang, since it has run on the event loop: reports continue.
"""

import os
import stat
from dataclasses import dataclass
from threading import Event, Thread
from typing import Final, Self

import structlog

from services.common.probes import Probes

log = structlog.get_logger()

VARIABLE: Final = "HEADRACE_LIVENESS_PIPE"


@dataclass(frozen=True)
class ReportPipe:
    """Write end of the pipe of a process, as an environment variable describes it.

    Attributes:
        descriptor: file descriptor, which the child process inherits.
        inode: inode of the pipe. It identifies the pipe, since a process may have inherited the
            variable without the descriptor.
        period_s: seconds between two reports.
    """

    descriptor: int
    inode: int
    period_s: float

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that describe the pipe to the child process."""
        return {VARIABLE: f"{self.descriptor} {self.inode} {self.period_s:g}"}

    @classmethod
    def inherited(cls) -> Self | None:
        """Return the pipe that this process has inherited, or None if it is not supervised."""
        try:
            descriptor, inode, period_s = os.environ.get(VARIABLE, "").split()
            pipe = cls(int(descriptor), int(inode), float(period_s))
            status = os.fstat(pipe.descriptor)
        except (ValueError, OSError):
            return None
        return pipe if stat.S_ISFIFO(status.st_mode) and status.st_ino == pipe.inode else None


class LivenessReports:
    """Writes reports from a daemon thread until `stop`.

    Args:
        pipe: pipe to the supervisor.
        probes: checks whose ``/health`` decides whether a report is written.
    """

    def __init__(self, pipe: ReportPipe, probes: Probes) -> None:
        self._pipe = pipe
        self._probes = probes
        self._stopped = Event()
        self._check_failed = False
        Thread(target=self._run, name="liveness", daemon=True).start()

    @classmethod
    def start(cls, probes: Probes) -> Self | None:
        """Start reports to the supervisor of this process; return None if it has none."""
        pipe = ReportPipe.inherited()
        return cls(pipe, probes) if pipe else None

    def stop(self) -> None:
        """Write no more reports."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._works() and not self._report():
                return
            self._stopped.wait(self._pipe.period_s)

    def _works(self) -> bool:
        """Return whether ``/health`` succeeds or its check is broken, which is logged once."""
        try:
            status, _ = self._probes.answer("/health")
        except Exception:
            if not self._check_failed:
                log.exception("health check failed; liveness reports continue")
            self._check_failed = True
            return True
        return status == 200

    def _report(self) -> bool:
        """Write a report; return False if the supervisor has ended."""
        try:
            os.write(self._pipe.descriptor, b".")
        except BlockingIOError:  # the supervisor is suspended and the pipe is full
            return True
        except OSError:
            return False
        return True
