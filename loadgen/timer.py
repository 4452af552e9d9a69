"""Timer with a finer resolution than event loops, whose timers count milliseconds."""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_KERNEL_LATE_S, _LOOP_LATE_S = 5e-4, 1.5e-3
_NANOSECONDS = 10**9


class Timer:
    """Timer for one sleep at a time; it uses a kernel timer on Linux, else the event loop's timer.

    Attributes:
        max_late_s: typical upper bound, in seconds, on how late a sleep ends on an idle machine.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._woken = asyncio.Event()
        self.max_late_s = _LOOP_LATE_S if descriptor is None else _KERNEL_LATE_S

    async def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, which must be above 0, or until `wake` is called."""
        self._woken.clear()
        if self._descriptor is None:
            asyncio.get_running_loop().call_later(seconds, self.wake)
        else:
            _set(self._descriptor, seconds)
        await self._woken.wait()

    def wake(self) -> None:
        """End the current sleep."""
        self._woken.set()


@contextmanager
def open_timer() -> Iterator[Timer]:
    """Open a timer on the running event loop."""
    loop = asyncio.get_running_loop()
    descriptor = _descriptor()
    timer = Timer(descriptor)
    if descriptor is None:
        yield timer
        return

    def expired() -> None:
        os.read(descriptor, 8)  # clear the expirations, or the descriptor stays readable
        timer.wake()

    loop.add_reader(descriptor, expired)
    try:
        yield timer
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


# The timer uses ctypes, because os.timerfd_create needs Python 3.13.


def _descriptor() -> int | None:
    """Return a new kernel timer, or None if this system has none."""
    if sys.platform != "linux":
        return None
    flags = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK, TFD_CLOEXEC
    descriptor = int(_libc().timerfd_create(time.CLOCK_MONOTONIC, flags))
    return None if descriptor < 0 else descriptor


def _set(descriptor: int, seconds: float) -> None:
    whole, rest = divmod(
        max(1, round(seconds * _NANOSECONDS)), _NANOSECONDS
    )  # 0 would disarm the timer
    once = (ctypes.c_long * 4)(0, 0, whole, rest)  # struct itimerspec: interval, then value
    if _libc().timerfd_settime(descriptor, 0, once, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
