"""Exclusive locks between processes, held until they are released or the process ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.file_errors import naming
from services.common.process_stat import ProcessStat


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, distinguished from later processes with the same pid.

    Attributes:
        pid: process id.
        started: start time, seconds since the boot of the machine. Steps of the wall clock do not
            change it.
    """

    pid: int
    started: float

    @classmethod
    def current(cls) -> "ProcessIdentity":
        """Return the identity of this process."""
        me = cls.of(os.getpid())
        if me is None:
            raise RuntimeError("this process has no entry in /proc")
        return me

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Return the identity of a process, or None if it does not run. A zombie does not count."""
        stat = ProcessStat.of(pid)
        return None if stat is None or stat.zombie else cls(pid, stat.started_s)

    @property
    def age_s(self) -> float:
        """Time since the start of the process, seconds."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.started

    @property
    def alive(self) -> bool:
        """Whether the process still runs. A zombie does not count."""
        return self.of(self.pid) == self


class LockHeld(Exception):
    """Another process holds the lock.

    Attributes:
        holder: process that holds the lock, or None if it has not written its identity yet.
    """

    def __init__(self, path: Path, holder: ProcessIdentity | None) -> None:
        super().__init__(
            f"{path} is locked by {f'process {holder.pid}' if holder else 'another process'}"
        )
        self.holder = holder


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a file.

    The kernel releases the lock when the process ends, even after SIGKILL. Child processes do not
    inherit it. The file is never removed: otherwise two processes could lock different files.

    Args:
        path: lock file; it is created with its folder, and contains the holder's identity.
        wait: whether to block until the lock is free.

    Raises:
        LockHeld: if another process holds the lock and ``wait`` is false.
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockHeld(path, holder_of(path)) from None
        me = ProcessIdentity.current()
        with naming(path):
            file.truncate(0)
            file.write(f"{me.pid} {me.started!r}\n".encode())
        try:
            yield
        finally:
            file.truncate(0)


def holder_of(path: Path) -> ProcessIdentity | None:
    """Return the process that holds a lock, or None. Does not take the lock."""
    try:
        pid, started = path.read_text().split()
        holder = ProcessIdentity(int(pid), float(started))
    except (FileNotFoundError, ValueError):
        return None
    return holder if holder.alive else None
