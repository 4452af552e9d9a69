"""Kernel objects without a name, shared by the processes of one worker.

They are passed as arguments of a `multiprocessing.Process` of the spawn context. The kernel frees
them when the last process that holds them has ended, however it ended. `multiprocessing`'s shared
memory and semaphores have names in /dev/shm instead, which a killed process leaves behind.
"""

import mmap
import os
import select
from collections.abc import Callable
from functools import cached_property
from multiprocessing import reduction
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]


class Descriptor:
    """A file descriptor that spawned processes inherit. It is closed with the object."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any]]:
        return type(self)._inherited, (reduction.DupFd(self._number),)

    @classmethod
    def _inherited(cls, duplicate: Any) -> Self:
        return cls(duplicate.detach())

    def __del__(self) -> None:
        os.close(self._number)


class SharedWords(Descriptor):
    """An int64 array in memory that processes share, initially 0."""

    @classmethod
    def of(cls, count: int) -> Self:
        """Return an array of ``count`` words."""
        number = os.memfd_create("headrace")
        os.ftruncate(number, count * np.dtype(np.int64).itemsize)
        return cls(number)

    @cached_property
    def words(self) -> Words:
        """The array."""
        return np.frombuffer(mmap.mmap(self._number, 0), np.int64)


class SharedCounter(Descriptor):
    """A count that one process adds to and another one takes, an eventfd.

    All accesses of the first process to shared memory before `add` happen before all accesses of
    the other one after the `take` that returns this count: the kernel changes the count under a
    spin lock, whose unlock in `add` is a release and whose lock in `take` is an acquire. This holds
    on x86-64 and, where the processor reorders more accesses, on AArch64.
    """

    @classmethod
    def of_zero(cls) -> Self:
        """Return a counter of 0."""
        return cls(os.eventfd(0))

    def add(self, count: int) -> None:
        os.eventfd_write(self._number, count)

    def take(self) -> int:
        """Return the count and set it to 0. Block while it is 0."""
        return os.eventfd_read(self._number)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the count is above 0. Return False if it still is 0 after the timeout."""
        return bool(self._poll.poll(1000 * timeout_s))

    @cached_property
    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._number, select.POLLIN)
        return poll
