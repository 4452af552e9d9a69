"""A TCP client that can send invalid HTTP."""

import asyncio
import json
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.services.gateway.conftest import Site

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
SHORT_TIMEOUTS = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "max_header_bytes": 4096}
TIMEOUT_S = 10.0


def post(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    lines = (*headers, b"content-length: %d" % (len(body) if length is None else length))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


@contextmanager
def allocations() -> Iterator[Callable[[], int]]:
    """Trace Python's allocations. Yield a function that returns the peak size in bytes."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Raw:
    """A TCP connection to the gateway of a `Site`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, site: Site, *data: bytes, local: str = "127.0.0.1") -> "Raw":
        """Connect from a local address, and send the data."""
        host, port = site.url.removeprefix("http://").split(":")
        raw = cls(*await asyncio.open_connection(host, int(port), local_addr=(local, 0)))
        for chunk in data:
            await raw.send(chunk)
        return raw

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, data: bytes, pause_s: float) -> None:
        """Send byte by byte, until the server disconnects."""
        with suppress(ConnectionError):
            for at in range(len(data)):
                await self.send(data[at : at + 1])
                await asyncio.sleep(pause_s)

    async def flood(self, data: bytes) -> None:
        """Send the same data repeatedly, until the server disconnects."""
        with suppress(ConnectionError):
            while True:
                await self.send(data)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Return the status, headers and JSON body of the next response."""
        async with asyncio.timeout(TIMEOUT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode().strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, json.loads(body)

    async def end(self) -> bytes:
        """Return everything received until the server closes the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            with suppress(ConnectionError):
                return await self.reader.read()
        return b""

    def reset_on_close(self) -> None:
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


async def check_refused(raw: Raw, status: int, code: str) -> None:
    got, headers, body = await raw.answer()
    assert (got, body["error"]["code"]) == (status, code), body
    assert headers["connection"] == "close"
    assert headers["x-request-id"].startswith("req-")
    assert await raw.end() == b""
    await raw.close()


async def check_alive(site: Site) -> None:
    assert (await site.http.get("/health")).status_code == 200
