"""The protocol by which a transfer runs codec work on the thread that owns the device."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from runtime.kv.cache import PagedCache

T = TypeVar("T")


class CodecJobs(Protocol):
    """Runs callables between two steps of the engine; the worker implements it."""

    def run_on_cache(self, job: Callable[[PagedCache], T]) -> "asyncio.Future[T]":
        """Call ``job`` with the KV cache on the device's thread.

        Returns:
            A future of the event loop with the result or the exception of ``job``.
        """
        ...
