"""A client that sends any bytes to an HTTP port and reads what comes back."""

import asyncio
import re
from contextlib import suppress

ANSWER_S = 20.0  # maximum time of an answer
SILENCE_S = 0.5  # time without an answer after which a mutated head counts as incomplete


class Connection:
    """A TCP connection that is opened again when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, data: bytes) -> tuple[int, bytes]:
        """Send a request that is framed correctly; return status and body of its answer.

        Raises:
            TimeoutError: there is no answer in time.
            EOFError, OSError: the server closed the connection without an answer.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        reader, writer = self._streams
        writer.write(data)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer(reader)
        except BaseException:
            await self.close()
            raise

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        headers = head.lower()
        if b"\r\ntransfer-encoding: chunked" in headers:
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            length = headers.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length or 0))
        if b"\r\nconnection: close" in headers:
            await self.close()
        return status, body

    async def close(self) -> None:
        if self._streams is not None:
            writer = self._streams[1]
            self._streams = None
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def send_raw(port: int, data: bytes) -> bytes:
    """Send bytes on a new connection; return everything that comes back before a silence."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with suppress(OSError, TimeoutError):
        writer.write(data)
        while True:
            async with asyncio.timeout(SILENCE_S):
                part = await reader.read(1 << 16)
            if not part:
                break
            if not received and writer.can_write_eof():
                writer.write_eof()  # instead of waiting for the end of an idle connection
            received += part
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return received


def statuses_of(received: bytes) -> list[int]:
    """Return the statuses of all responses in received bytes."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", received)]
