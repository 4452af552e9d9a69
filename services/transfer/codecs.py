"""Which codebooks a worker encodes and decodes with, and the codec of each group of layers."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

import codec
from services.transfer.policy import WireMode

T = TypeVar("T")


@dataclass(frozen=True)
class CodecPlan:
    """The codebooks of this worker's planes; a plane without one is always sent raw."""

    codebooks: tuple[codec.Codebook | None, ...]
    _kept: dict[tuple[int, int, WireMode], codec.PagedCodec] = field(default_factory=dict)

    def of(
        self,
        planes: Sequence[Tensor],
        first: int,
        count: int,
        mode: WireMode = WireMode.SPLITZIP,
    ) -> codec.PagedCodec:
        """The codec of these layers, made once.

        Args:
            planes: of all layers, K and V by turns; the same at each call.
        """
        key = first, count, mode
        if key not in self._kept:
            layers = slice(2 * first, 2 * (first + count))
            self._kept[key] = codec.paged(planes[layers], self._layers(first, count, mode))
        return self._kept[key]

    def escape_rate(self, first: int, count: int) -> float:
        """The share of these layers' elements that the calibration found no code for."""
        layers = self._layers(first, count, WireMode.SPLITZIP)
        books = [book for book in layers if book is not None]
        return sum(book.escape_rate for book in books) / max(1, len(books))

    def _layers(self, first: int, count: int, mode: WireMode) -> Sequence[codec.Codebook | None]:
        if mode is WireMode.RAW:
            return (None,) * (2 * count)
        return self.codebooks[2 * first : 2 * (first + count)]


async def outcome_of(pending: codec.Pending[T]) -> T:
    """What a call of the codec came to. What a GPU has not done yet is waited for elsewhere."""
    if pending.done:
        return pending.result()
    return await _waiter.result_of(pending)


class _Waiter:
    """A thread that waits for one launch after another, as they end on their stream.

    It is a daemon: a device that does not answer must not keep the process from ending.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def result_of(self, pending: codec.Pending[T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(error: Exception | None, result: T | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def wait() -> None:
            error, result = None, None
            try:
                result = pending.result()
            except Exception as caught:  # noqa: BLE001 - raised again where it is awaited
                error = caught
            with suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(settle, error, result)

        self._inbox.put(wait)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="codec-waiter", daemon=True)
            self._thread.start()
        return await future

    def _run(self) -> None:
        while True:
            self._inbox.get()()


_waiter = _Waiter()
