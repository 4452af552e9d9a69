"""Signal handling during the start of a process, on SIGHUP, at its stop and its parent's end."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Request a signal for this child process when the thread that started it ends (Linux only)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def prepare_service_process() -> None:
    """Set up the signals of a child process that will run a service."""
    end_with_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the service handles it


def end_on_sigterm_as_first_process() -> None:
    """Let SIGTERM end the first process of a container (PID 1) until the service handles it.

    The kernel ignores SIGTERM for PID 1 without a handler. A worker that still reads its model
    would then only end with the SIGKILL after the grace period.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def ignore_sighup_during_start() -> None:
    """Ignore SIGHUP until `handle_sighup`, if this process has no terminal.

    SIGHUP asks a service to read its files again. A service that is starting will read them anyway.
    """
    if not has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def handle_sighup(reload: Callable[[], None]) -> None:
    """Call ``reload`` on SIGHUP. If the terminal of this process was closed, raise SIGTERM instead.

    If SIGHUP is ignored now, as under nohup, the end of the terminal does not end the process.
    """
    ends_with_terminal = has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    def handle() -> None:
        if ends_with_terminal and not has_terminal():
            signal.raise_signal(signal.SIGTERM)
        else:
            reload()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, handle)


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal that was not closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
