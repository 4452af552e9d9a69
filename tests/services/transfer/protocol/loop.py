"""An event loop without clock and sockets, which runs only when it is told to."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from types import CoroutineType
from typing import Any


class _Task(asyncio.Task[Any]):
    """A task that is hashed by its number: sets of tasks have the same order in every run."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class StepLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in order until none is ready. Its time stays 0; timers are fired by hand.

    Attributes:
        tasks: tasks that have not ended, oldest first.
        timers: timers that were neither fired nor cancelled, in the order in which they were set.
        errors: errors that nothing else handles.
    """

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []
        self.timers: list[asyncio.TimerHandle] = []
        self.errors: list[str] = []
        self._ready: deque[asyncio.Handle] = deque()
        self._discarded = False
        self._created = 0

    def run_until_idle(self) -> None:
        """Run all callbacks that are ready, and those that they make ready."""
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        self.tasks = [task for task in self.tasks if not task.done()]

    def fire(self, timer: asyncio.TimerHandle) -> None:
        """Make the callback of a timer ready."""
        self.timers.remove(timer)
        self._ready.append(timer)

    def close(self) -> None:
        """End all tasks at once, without the callbacks at their ends."""
        self._discarded = True
        asyncio._set_running_loop(self)
        try:
            for task in self.tasks:
                for coroutine in reversed(_chain(task.get_coro())):
                    _close(coroutine)
        finally:
            asyncio._set_running_loop(None)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        return 0.0

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.timers.append(timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle in self.timers:
            self.timers.remove(handle)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: object = None, context: Context | None = None
    ) -> "asyncio.Task[Any]":
        self._created += 1
        task = _Task(self._created, coro, loop=self, name="task", context=context)
        self.tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._discarded:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")


def _chain(coroutine: Any) -> list[Any]:
    """Return a coroutine, the one that it awaits, and so on."""
    chain = []
    while isinstance(coroutine, CoroutineType):
        chain.append(coroutine)
        coroutine = coroutine.cr_await
    return chain


def _close(coroutine: Any) -> None:
    for _ in range(3):  # one that awaits something while it ends must be closed again
        with suppress(RuntimeError):
            coroutine.close()
            return
