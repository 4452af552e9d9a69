"""Epochs of workers that have ended, so that nothing of a worker's earlier life is accepted."""

from collections import OrderedDict
from typing import TypeVar

from services.common.router_errors import ErrorCode
from services.router.errors import Refusal

MAX_REMEMBERED = 4096
"""Maximum number of ended epochs, and of other entries of `remember`, that are remembered."""

K = TypeVar("K")
V = TypeVar("V")


class Epochs:
    """The newest epoch of each worker, and the epochs that have ended."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, str] = OrderedDict()
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()

    def check(self, worker_id: str, epoch: str) -> None:
        """Raise a `Refusal` if the epoch has ended or was replaced."""
        if (worker_id, epoch) in self._ended:
            raise Refusal(ErrorCode.STALE_EPOCH, f"epoch {epoch} of worker {worker_id} has ended")

    def begin(self, worker_id: str, epoch: str) -> None:
        """Make an epoch the newest one of its worker; the one before it has ended."""
        last = self._newest.get(worker_id, epoch)
        if last != epoch:
            self.end(worker_id, last)
        remember(self._newest, worker_id, epoch)

    def end(self, worker_id: str, epoch: str) -> None:
        """End an epoch, even if it never began here."""
        remember(self._ended, (worker_id, epoch), None)


def remember(memory: "OrderedDict[K, V]", key: K, value: V) -> None:
    """Set an entry. Beyond `MAX_REMEMBERED` entries, the oldest is dropped."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)
