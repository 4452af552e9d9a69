"""Threads of the processes of a worker."""

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

SWITCH_S = 5e-5
"""Python's thread switch interval while a worker runs. The default of 5 ms is longer than a decode
step, which the engine thread must launch while the event loop serves many streams."""


def set_switch_interval() -> None:
    """Set the interval at which Python switches between the threads of this process."""
    sys.setswitchinterval(SWITCH_S)


def start_in_thread(call: Callable[[], T]) -> "Future[T]":
    """Run a call on a thread that does not prevent the end of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again where the future is read
            future.set_exception(error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return future


async def in_thread(call: Callable[[], T]) -> T:
    """Return the result of a call on a thread that does not prevent the end of the process."""
    return await asyncio.wrap_future(start_in_thread(call))
