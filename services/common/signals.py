"""Signals during the start of a process, and the end of its parent."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Request SIGTERM for this child process when its parent ends (Linux only)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def prepare_service_process() -> None:
    """Set up the signals of a child process that will run a service."""
    end_with_parent()
    ignore_sighup_during_start()


def end_on_sigterm_as_first_process() -> None:
    """Let SIGTERM end the first process of a container (PID 1) until the service handles it.

    The kernel ignores SIGTERM for PID 1 without a handler. A worker that still reads its model
    would then only end with the SIGKILL after the grace period.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def ignore_sighup_during_start() -> None:
    """Ignore SIGHUP until the service handles it.

    It asks a service to read its files again. A service that is starting will read them anyway.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, whose end it learns by SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
