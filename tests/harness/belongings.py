"""Processes, shared memory and files that must be gone when a deployment has ended."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


@dataclass(frozen=True)
class Belongings:
    """Processes, and the files in shared memory that they have mapped.

    Ports and memory without a name belong to the processes.
    """

    processes: tuple[psutil.Process, ...]
    files: frozenset[Path]

    @classmethod
    def of(cls, pids: Iterable[int]) -> Self:
        """Return the belongings of processes. Those that have ended have none."""
        processes, paths = [], set()
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                paths |= {Path(each.path) for each in process.memory_maps()}
                processes.append(process)
        return cls(tuple(processes), frozenset(p for p in paths if Path("/dev/shm") in p.parents))

    def left(self) -> list[object]:
        """Return those that still exist."""
        return [
            *(process for process in self.processes if is_running(process)),
            *(file for file in self.files if file.exists()),
        ]


def is_running(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie has ended, and its parent has not yet reaped it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
