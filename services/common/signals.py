"""Signals that end a process whose parent has ended or which is still starting."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Request SIGTERM for this child process when its parent ends (Linux only)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_on_sigterm_as_first_process() -> None:
    """Let SIGTERM end the first process of a container (PID 1) until the service handles it.

    The kernel ignores SIGTERM for PID 1 without a handler. A worker that still reads its model
    would then only end with the SIGKILL after the grace period.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
