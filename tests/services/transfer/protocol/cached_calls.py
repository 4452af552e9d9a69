"""gRPC calls between workers with cached pages: both sides' code runs, handshake included."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from grpc import StatusCode, aio

from services.decode import fetched_streams
from services.prefill import history
from services.transfer import prefill_client
from services.worker import prefill_service, stream_service, streams
from tests.services.transfer.protocol.agent import Stream
from tests.services.transfer.protocol.parts import CLOCK, IGNORE, NONCES


class Aborted(Exception):
    """The server of a call has ended it with a status."""

    def __init__(self, status: StatusCode) -> None:
        super().__init__(status.name)
        self.status = status


class Call(Stream):
    """One side of a session's call."""

    def __init__(self) -> None:
        super().__init__()
        self._status = StatusCode.UNAVAILABLE

    async def abort(self, status: StatusCode, details: str) -> None:
        """End the call as its server."""
        raise Aborted(status)

    def end_with(self, status: str) -> None:
        """Let the call end with a status of the server, by its name."""
        self._status = StatusCode[status]
        self.end()

    async def read(self) -> Any:
        try:
            return await super().read()
        except aio.AioRpcError as error:
            none = aio.Metadata()
            raise aio.AioRpcError(self._status, none, none, "the call has ended") from error


class Caller(Protocol):
    """A worker that opens calls."""

    def open_call(self, address: str) -> Call:
        """Return the client's side of a new call."""
        ...


class Network:
    """Opens the calls of the worker that processes an input."""

    caller: Caller

    def open_channel(self, address: str, *_: object, **__: object) -> "Channel":
        """Return a channel, in place of `open_channel`."""
        return Channel(address, self.caller)


NETWORK = Network()


class Channel:
    """A gRPC channel, whose calls are the messages that the search delivers."""

    def __init__(self, address: str, caller: Caller) -> None:
        self._address = address
        self._caller = caller

    def Session(self, metadata: object) -> Call:  # named by the schema
        """Open a call, in place of `PrefillStub.Session`."""
        return self._caller.open_call(self._address)

    async def close(self, grace: object) -> None:
        """Close the channel; its calls have ended."""


def _stub(channel: Channel) -> Channel:
    return channel


def _uuid4() -> Any:
    return SimpleNamespace(hex=f"{NONCES.randbits(64):012x}")


@contextmanager
def with_calls() -> Iterator[None]:
    """Replace gRPC, clocks and random names of workers with cached pages, and disable logs."""
    with ExitStack() as stack:
        put = stack.enter_context
        put(patch.object(prefill_client, "open_channel", NETWORK.open_channel))
        put(patch.object(prefill_client, "PrefillStub", _stub))
        put(patch.object(prefill_service, "uuid", SimpleNamespace(uuid4=_uuid4)))
        put(patch.object(history, "HistoryMetrics", IGNORE))
        for module in (history, streams, stream_service, fetched_streams):
            put(patch.object(module, "time", CLOCK))
        for module in (history, prefill_service, streams):
            put(patch.object(module, "log", IGNORE))
        put(patch.object(streams, "Stream", partial(streams.Stream, began=0.0)))
        yield
