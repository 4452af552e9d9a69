"""A timer finer than those of event loops, which count milliseconds."""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_KERNELS_LATE_S, _LOOPS_LATE_S = 5e-4, 1.5e-3
_NANOSECONDS = 10**9


class Timer:
    """One sleep at a time: of the kernel's timer on Linux, elsewhere of the event loop's.

    Attributes:
        late_s: by how much sleeps end late, seconds, at most unless the machine is busy.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor, self._ringing = descriptor, asyncio.Event()
        self.late_s = _LOOPS_LATE_S if descriptor is None else _KERNELS_LATE_S

    async def sleep(self, seconds: float) -> None:
        """For more than 0 seconds, or until it rings."""
        self._ringing.clear()
        if self._descriptor is None:
            asyncio.get_running_loop().call_later(seconds, self.ring)
        else:
            _set(self._descriptor, seconds)
        await self._ringing.wait()

    def ring(self) -> None:
        """Ends the sleep."""
        self._ringing.set()


@contextmanager
def open_timer() -> Iterator[Timer]:
    """Of the running event loop."""
    loop, descriptor = asyncio.get_running_loop(), _descriptor()
    timer = Timer(descriptor)
    if descriptor is None:
        yield timer
        return

    def expired() -> None:
        os.read(descriptor, 8)  # how often: else it stays readable
        timer.ring()

    loop.add_reader(descriptor, expired)
    try:
        yield timer
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


# Python has these from 3.13 on, as os.timerfd_create and os.timerfd_settime_ns.


def _descriptor() -> int | None:
    """Of a new kernel timer; None: this is no Linux, or one that has none to give."""
    if sys.platform != "linux":
        return None
    flags = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK, TFD_CLOEXEC
    descriptor = int(_libc().timerfd_create(time.CLOCK_MONOTONIC, flags))
    return None if descriptor < 0 else descriptor


def _set(descriptor: int, seconds: float) -> None:
    whole, rest = divmod(max(1, round(seconds * _NANOSECONDS)), _NANOSECONDS)  # 0 would disarm it
    once = (ctypes.c_long * 4)(0, 0, whole, rest)  # struct itimerspec: interval, then value
    if _libc().timerfd_settime(descriptor, 0, once, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
