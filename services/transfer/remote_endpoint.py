"""The KV endpoint of a rank in another process of the same worker.

`RemoteEndpoint` sends each call through a pipe to `serve_endpoint`, which executes it on the
endpoint of that process and returns the result. Messages are pickled, so both ends of the pipe must
belong to one worker. Calls in progress are few, because slots bound them. Their messages fit the
pipe's buffers, so that no side blocks while it sends.

Steps reach the executor of that process on another path, which an encode or decode may overtake. It
then waits there until the step has recorded the event after which it may run (`Events.wait`).
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import structlog

from headrace.v1 import prefill_pb2 as pb
from runtime.kv.cache import CacheLayout
from runtime.pages.sent import SentTokens
from services.transfer.codec_calls import Timed
from services.transfer.codecs import Books, SegmentCodecs
from services.transfer.endpoint import EncodedSegment, KVEndpoint
from services.transfer.errors import ReadTimeout, TransferClosed, TransferError
from services.transfer.extent import Extent
from services.transfer.frame import FrameHeader
from services.transfer.nixl_agent import ReadDone

log = structlog.get_logger()

_CLOSE_S = 15.0
"""Maximum seconds in which the other process shuts its endpoint down."""
_FAULT = -1
"""Number of the answer that reports a fault."""


@dataclass(frozen=True)
class _Description:
    layout: CacheLayout
    slot_bytes: int
    readable: pb.Endpoint
    connection: pb.Endpoint


class _Call(NamedTuple):
    number: int
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Answer(NamedTuple):
    """Result of a call, or its error. An overdue READ has a second answer when it has drained."""

    number: int
    result: Any = None
    error: BaseException | None = None
    is_overdue: bool = False


def _always() -> bool:
    return True


class RemoteEndpoint(KVEndpoint):
    """Calls the endpoint of another process.

    Args:
        connection: pipe to `serve_endpoint`.
        codebooks: codebooks of the worker, which all ranks have.
    """

    def __init__(self, connection: Connection, codebooks: Books) -> None:
        described: _Description = connection.recv()
        self.codecs = SegmentCodecs(
            described.layout, codebooks, first_kv_head=described.readable.first_kv_head
        )
        self.slot_bytes = described.slot_bytes
        self.readable = described.readable
        self.connection = described.connection
        self.fault = Future()
        self._pipe = connection
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {_FAULT: self.fault}
        self._drains: dict[int, Future[None]] = {}
        self._is_closed = False
        self._probe: Future[float] | None = None
        self._probed_at = 0.0
        self._thread = threading.Thread(target=self._receive, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def stalled_s(self) -> float:
        """`KVEndpoint.stalled_s` in the last answer, or the seconds without an answer."""
        now, probe = time.monotonic(), self._probe
        if probe is not None and not probe.done():
            return now - self._probed_at
        self._probed_at = now
        self._probe = self._call("stalled_s")
        return 0.0 if probe is None or probe.exception() else probe.result()

    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        return self._call("add_peer", name, metadata)

    def remove_peer(self, name: str) -> "Future[None]":
        return self._call("remove_peer", name)

    def encode(
        self,
        segment: pb.Segment,
        header: FrameHeader,
        pages: Sequence[int],
        *,
        after: int | None,
        notify: str,
        is_wanted: Callable[[], bool],
    ) -> "Future[Timed[EncodedSegment] | None]":
        return self._call(
            *("encode", segment, header, tuple(pages)),
            only_if=is_wanted,
            after=after,
            notify=notify,
            is_wanted=_always,
        )

    def read(
        self, sender: pb.Endpoint, offset: int, slot: int, length: int, *, deadline_s: float
    ) -> "Future[ReadDone]":
        return self._call("read", sender, offset, slot, length, deadline_s=deadline_s)

    def prepare_decode(self, extent: Extent) -> None:
        self._call("prepare_decode", extent)

    def decode(
        self,
        segment: pb.Segment,
        ready: pb.SegmentReady,
        expected: FrameHeader,
        slot: int,
        pages: Sequence[int],
        *,
        after: int | None,
        is_wanted: Callable[[], bool],
    ) -> "Future[Timed[None] | None]":
        return self._call(
            *("decode", segment, ready, expected, slot, tuple(pages)),
            only_if=is_wanted,
            after=after,
            is_wanted=_always,
        )

    def codec_idle(self) -> "Future[None]":
        return self._call("codec_idle")

    def digest(
        self,
        page_tables: Sequence[Sequence[int]],
        sent: SentTokens,
        *,
        after: int | None = None,
    ) -> dict[int, list[str]]:
        found: dict[int, list[str]] = self._call("digest", page_tables, sent, after=after).result()
        return found

    def close(self) -> None:
        with self._lock, suppress(OSError):
            if not self._is_closed:
                self._is_closed = True
                self._pipe.send(None)
        self._thread.join(_CLOSE_S)

    def _call(
        self, name: str, *arguments: Any, only_if: Callable[[], bool] = _always, **options: Any
    ) -> "Future[Any]":
        """Send a call to the other process; if ``only_if`` returns False, the result is None.

        The lock is held while ``only_if`` is called and the call is sent, so that a call of
        `codec_idle` after ``only_if`` has changed follows all calls for which it returned True.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a call that was sent cannot be cancelled
        try:
            with self._lock:
                if not only_if():
                    future.set_result(None)
                    return future
                if self._is_closed:
                    raise TransferClosed("the endpoint is closed")
                number = next(self._numbers)
                self._pipe.send(_Call(number, name, arguments, options))
                self._calls[number] = future  # its answer waits for the lock
        except (TransferClosed, OSError) as error:
            future.set_exception(TransferClosed(f"the rank of the endpoint has ended: {error}"))
        return future

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._pipe.recv())
        except (EOFError, OSError):
            log.debug("the pipe of a rank was closed")
        except Exception:
            log.exception("an answer of a rank cannot be used")
        finally:
            self._end()

    def _take(self, answer: _Answer) -> None:
        if drained := self._drains.pop(answer.number, None):
            drained.set_result(None)
            return
        with self._lock:
            future = self._calls.pop(answer.number)
        if answer.is_overdue:
            drained = self._drains[answer.number] = Future()
            drained.set_running_or_notify_cancel()
            future.set_exception(ReadTimeout(str(answer.error), drained))
        elif answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.result)

    def _end(self) -> None:
        """Close the pipe and fail all calls, because no further answers are read.

        Usually the other process has ended and accesses no memory. Otherwise, `fault` ends this
        process.
        """
        with self._lock:
            calls, self._calls = self._calls, {}
            if self._is_closed:
                calls.pop(_FAULT, None)
            self._is_closed = True
            self._pipe.close()
        error = TransferClosed("the process of a rank has ended")
        for future in calls.values():
            future.set_exception(error)
        for drained in self._drains.values():
            drained.set_result(None)


def serve_endpoint(connection: Connection, endpoint: KVEndpoint) -> None:
    """Execute the calls of a `RemoteEndpoint` until it is closed, then close the endpoint.

    Args:
        connection: the other end of its pipe.
    """
    lock = threading.Lock()

    def send(answer: _Answer) -> None:
        try:
            message = ForkingPickler.dumps(answer)
        except Exception as error:  # noqa: BLE001 - any error of a class that cannot be pickled
            what = answer.error or error
            message = ForkingPickler.dumps(_Answer(answer.number, error=TransferError(repr(what))))
        with lock, suppress(OSError):  # the other process may have closed its end
            connection.send_bytes(message)

    connection.send(
        _Description(endpoint.layout, endpoint.slot_bytes, endpoint.readable, endpoint.connection)
    )
    endpoint.fault.add_done_callback(partial(_answer, send, _FAULT))
    try:
        while call := connection.recv():
            _execute(endpoint, call, send)
    except (EOFError, OSError):
        return
    finally:
        endpoint.close()
        connection.close()


def _execute(endpoint: KVEndpoint, call: _Call, send: Callable[[_Answer], None]) -> None:
    try:
        found = getattr(endpoint, call.name)
        result = found(*call.arguments, **call.options) if callable(found) else found
    except Exception as error:  # noqa: BLE001 - raised again where the call is awaited
        send(_Answer(call.number, error=error))
        return
    if isinstance(result, Future):
        result.add_done_callback(partial(_answer, send, call.number))
    else:
        send(_Answer(call.number, result))


def _answer(send: Callable[[_Answer], None], number: int, future: "Future[Any]") -> None:
    """Send the result of a future."""
    error = future.exception()
    if isinstance(error, ReadTimeout):
        send(_Answer(number, error=TransferError(str(error)), is_overdue=True))
        error.drained.add_done_callback(lambda _: send(_Answer(number)))
    elif error is not None:
        send(_Answer(number, error=error))
    else:
        send(_Answer(number, future.result()))
