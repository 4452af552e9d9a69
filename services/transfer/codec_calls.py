"""Codec calls on the transfer thread, and futures of their results."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import codec
from services.transfer.errors import TransferClosed

T = TypeVar("T")


@dataclass(frozen=True)
class Timed(Generic[T]):
    """Result of a codec call, and the seconds that the codec alone took."""

    value: T
    seconds: float


class CodecRunner(Protocol):
    """Runs codec calls; `services.transfer.agent.TransferAgent` implements it."""

    def run_codec(self, launch: Callable[[], codec.Pending[T] | None]) -> "Future[Timed[T] | None]":
        """Launch a codec call on the transfer thread.

        Calls are launched, and their futures settle, in the order of these requests.

        Args:
            launch: starts the call, or returns None if it is not needed.

        Returns:
            Future of the result, None if ``launch`` returned None. It fails with the exception of
            ``launch`` or of the call.
        """
        ...


class CodecCalls:
    """Polls codec calls in progress and settles their futures. Used on one thread only.

    All calls run on one CUDA stream, so they end in launch order. A future is therefore settled
    after those of all earlier calls.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[codec.Pending[Any] | None, Future[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def start(
        self, launch: Callable[[], codec.Pending[T] | None], future: "Future[Timed[T] | None]"
    ) -> None:
        """Launch a call; see `CodecRunner.run_codec`."""
        try:
            self._calls.append((launch(), future))
        except Exception as error:  # noqa: BLE001 - raised again where the future is read
            future.set_exception(error)

    def poll(self) -> bool:
        """Settle the calls that have ended; return whether there were any."""
        before = len(self._calls)
        while self._calls and ((call := self._calls[0][0]) is None or call.done):
            _, future = self._calls.popleft()
            try:
                result = None if call is None else Timed(call.result(), call.seconds)
            except Exception as error:  # noqa: BLE001 - raised again where the future is read
                future.set_exception(error)
            else:
                future.set_result(result)
        return len(self._calls) < before

    def close(self) -> None:
        """Fail the futures of all calls that have not ended."""
        while self._calls:
            _, future = self._calls.popleft()
            future.set_exception(TransferClosed("the transfer thread has ended"))
