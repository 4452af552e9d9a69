"""Await the result of codec work without blocking the event loop or the device's thread."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import codec

T = TypeVar("T")


async def outcome_of(pending: codec.Pending[T]) -> T:
    """Return the result of a codec call, waiting for the GPU if necessary."""
    if pending.done:
        return pending.result()
    return await _waiter.result_of(pending)


class _Waiter:
    """Thread that waits for launches one after another, in launch order.

    It is a daemon thread, so that the process can exit while a device hangs.
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
            with suppress(RuntimeError):  # the loop is closed
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
