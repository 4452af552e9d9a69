"""The ranks of a worker in threads of one process.

One thread runs at a time, until its next collective, because Triton's interpreter is not
thread-safe.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from runtime.parallel.group import RankGroup, side_by_side

T = TypeVar("T")

TIMEOUT_S = 60


class _Meeting:
    """Exchanges one tensor of every rank at a time.

    Attributes:
        running: held by the thread that runs.
    """

    def __init__(self, size: int) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.running = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        self.tensors[rank] = tensor
        self._wait()
        found = [each.clone() for each in self.tensors]
        self._wait()
        return found

    def _wait(self) -> None:
        self.running.release()
        try:
            self._barrier.wait()
        finally:
            self.running.acquire()

    def abort(self) -> None:
        self._barrier.abort()


class ThreadGroup(RankGroup):
    """One rank, which a thread of its own runs.

    Attributes:
        calls: name and shape of the argument of each collective so far.
    """

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, size
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, addend: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_reduce", addend)).sum(0)

    def all_gather(self, part: Tensor) -> Tensor:
        return side_by_side(torch.stack(self._exchange("all_gather", part)))

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        assert tensor.is_contiguous()
        self.calls.append((name, tuple(tensor.shape)))
        found = self._meeting.exchange(self.rank, tensor)
        assert len({(each.shape, each.dtype) for each in found}) == 1
        return found


def on_ranks(size: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """Call ``run`` once for each rank, in threads, and return the results in order."""
    meeting = _Meeting(size)

    def call(rank: int) -> T:
        try:
            with meeting.running:
                return run(ThreadGroup(meeting, rank, size))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(call, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception())]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
