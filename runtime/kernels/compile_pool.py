"""Compile kernels in parallel, in a pool of processes.

Triton compiles in the process and the thread that launch a kernel, one kernel after another. The
processes of a pool compile kernels into Triton's cache on disk instead, from which the process that
launches them then loads them. They do not use the GPU.

A pool only saves time: a kernel that could not be compiled is compiled when it is launched.
"""

import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Self

from runtime.kernels.launches import KernelSource

MAX_PROCESSES = 16
KERNEL_LIMIT_S = 60.0
"""Time limit for one kernel, after which its process is killed."""
_PROCESS_BYTES = 1 << 30
"""Free host memory that each process requires."""
_COMMAND = (sys.executable, "-m", "runtime.kernels.compiler")


@dataclass
class PoolStatus:
    """Progress of a pool.

    Attributes:
        submitted: number of kernels that were submitted.
        done: number of kernels of which the processes are done, compiled or not.
        errors: one message for each kernel that was not compiled.
    """

    submitted: int
    done: int
    errors: list[str]


class CompilePool:
    """Processes that compile kernels. Leaving the pool as a context manager ends them.

    Args:
        processes: number of processes; None for one per core, or fewer if memory is short.
        kernel_limit_s: time limit for one kernel.
        command: command line of a process.
    """

    def __init__(
        self,
        processes: int | None = None,
        *,
        kernel_limit_s: float = KERNEL_LIMIT_S,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._queue: SimpleQueue[KernelSource | None] = SimpleQueue()
        self._changed = Condition()
        self._status = PoolStatus(0, 0, [])
        self._command, self._limit_s = command, kernel_limit_s
        count = processes or default_processes()
        self._threads = [
            Thread(target=self._run, name=f"compile-{n}", daemon=True) for n in range(count)
        ]
        self._running = count
        self._children: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, source: KernelSource) -> None:
        """Queue a kernel for compilation. Does not block."""
        with self._changed:
            self._status.submitted += 1
        self._queue.put(source)

    def wait(self, progress: Callable[[PoolStatus], None] = lambda _: None) -> PoolStatus:
        """Wait until all submitted kernels are done, or no process is left to compile them.

        Args:
            progress: called whenever more kernels are done.
        """
        done = -1
        while True:
            status, finished = self._next_status(done)
            done = status.done
            progress(status)
            if finished:
                return status

    def _next_status(self, done: int) -> tuple[PoolStatus, bool]:
        """Wait until more than ``done`` kernels are done; return the status, and if it is final."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.done > done or not self._running)
            finished = self._status.done == self._status.submitted or not self._running
            return replace(self._status, errors=list(self._status.errors)), finished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._closed = True
            for child in self._children:
                child.kill()
        for _thread in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        """Start a process and pass kernels to it. Ends when the process fails."""
        try:
            child = self._start()
            if child is not None:
                with child:
                    self._serve(child)
        except OSError as error:
            self._report(f"cannot start {self._command[0]}: {error}", done=0)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _start(self) -> "subprocess.Popen[bytes] | None":
        with self._changed:
            if self._closed:
                return None
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
            self._children.add(child)
            return child

    def _serve(self, child: "subprocess.Popen[bytes]") -> None:
        assert child.stdin is not None
        try:
            while (source := self._queue.get()) is not None:
                error, usable = self._compile(child, source)
                self._report(error and f"{source.name}: {error}")
                if not usable:
                    return
        finally:
            child.kill()
            with self._changed:
                self._children.remove(child)
            with suppress(BrokenPipeError):
                child.stdin.close()

    def _compile(self, child: "subprocess.Popen[bytes]", source: KernelSource) -> tuple[str, bool]:
        """Return the error, empty if there was none, and whether the process can go on."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickled = pickle.dumps(source)
        except Exception as error:  # noqa: BLE001 - the kernel is then compiled at its launch
            return f"cannot be pickled: {error!r}", True
        try:
            child.stdin.write(pickled)
            child.stdin.flush()
        except BrokenPipeError:
            return f"the process ended with code {child.wait()}", False
        if not select.select([child.stdout], [], [], self._limit_s)[0]:
            return f"not compiled within {self._limit_s:g} s", False
        reply = child.stdout.readline()
        if not reply:
            return f"the process ended with code {child.wait()}", False
        return reply.decode().strip(), True

    def _report(self, error: str, done: int = 1) -> None:
        with self._changed:
            self._status.done += done
            if error and not self._closed:
                self._status.errors.append(error)
            self._changed.notify_all()


def default_processes() -> int:
    """Return the number of processes for this machine: by cores and by free memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = dict(line.split()[:2] for line in lines)
    memory = int(sizes["MemAvailable:"]) * 1024 // _PROCESS_BYTES
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)), memory))
