"""What a client can do below HTTP: every state of a connection is bounded, and nothing stays."""

import asyncio
import gc
import json
import socket
import struct
import weakref
from contextlib import suppress
from typing import Any

import psutil
import pytest

from services.gateway.connection import Connection
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import FakeStream, say, until

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
QUICK = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "max_header_bytes": 4096}
STREAM = json.dumps({"prompt": "x", "max_tokens": 8000, "stream": True}).encode()
PATIENCE_S = 10.0


def post(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    lines = (*headers, b"content-length: %d" % (len(body) if length is None else length))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


class Raw:
    """A client without manners."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, site: Site, *data: bytes) -> "Raw":
        host, port = site.url.removeprefix("http://").split(":")
        raw = cls(*await asyncio.open_connection(host, int(port)))
        for chunk in data:
            await raw.send(chunk)
        return raw

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, data: bytes, pause_s: float) -> None:
        """Sends byte by byte, until the other side has enough."""
        with suppress(ConnectionError):
            for at in range(len(data)):
                await self.send(data[at : at + 1])
                await asyncio.sleep(pause_s)

    async def flood(self, data: bytes) -> None:
        """Sends the same for ever, until the other side has enough."""
        with suppress(ConnectionError):
            while True:
                await self.send(data)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """The next answer; its body is JSON."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode().strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, json.loads(body)

    async def end(self) -> bytes:
        """What came until the other side hung up."""
        async with asyncio.timeout(PATIENCE_S):
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


async def refused(raw: Raw, status: int, code: str) -> None:
    got, headers, body = await raw.answer()
    assert (got, body["error"]["code"]) == (status, code), body
    assert headers["connection"] == "close"
    assert headers["x-request-id"].startswith("req-")
    assert await raw.end() == b""
    await raw.close()


async def lives_on(site: Site) -> None:
    assert (await site.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        GET[:-2] + b"".join(b"x-%d: y\r\n" % i for i in range(1000)) + b"\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        GET[:-2] + b"x: " + b"a" * 5000,
        b"\r\n" * 3000,
    ],
    ids=["headers", "path", "endless value", "empty lines"],
)
async def test_a_large_head_is_refused(open_site: OpenSite, head: bytes) -> None:
    site: Site = await open_site(**QUICK)
    await refused(await Raw.to(site, head), 431, "headers_too_large")
    assert site.metric("headrace_requests_total", endpoint="unknown", status="431") == 1
    await lives_on(site)


async def test_a_head_within_the_bound_passes(open_site: OpenSite) -> None:
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site, GET[:-2] + b"x: " + b"a" * 3900, b"\r\n\r\n")
    assert (await raw.answer())[0] == 200
    for _ in range(3):  # each request of a connection has its own bound
        await raw.send(GET[:-2] + b"x: " + b"a" * 3900 + b"\r\n\r\n")
        assert (await raw.answer())[0] == 200
    await raw.close()


@pytest.mark.parametrize(
    "framing",
    [b"1;" + b"a" * 5000, b"1\r\n{\r\n0\r\nx: " + b"a" * 5000],
    ids=["chunk extension", "trailer"],
)
async def test_what_surrounds_a_body_is_bounded(open_site: OpenSite, framing: bytes) -> None:
    site: Site = await open_site(**QUICK)
    chunked = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    raw = await Raw.to(site, chunked + framing)
    await asyncio.sleep(0.05)
    await raw.send(b"a" * 5000)
    await refused(raw, 431, "headers_too_large")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (GET[:-2] + b"x: " + b"a" * 5000, 431, "headers_too_large"),
        (b"no HTTP\r\n\r\n", 400, "invalid_value"),
        (post(b"", b"connection: close", length=10**9), 413, "request_too_large"),
    ],
    ids=["headers", "no HTTP", "body"],
)
async def test_who_still_writes_can_read_why_it_is_refused(
    open_site: OpenSite, sent: bytes, status: int, code: str
) -> None:
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site, sent)
    for _ in range(3):  # the second would meet a reset
        await asyncio.sleep(0.05)
        await raw.send(b"a" * 1000)
    await refused(raw, status, code)
    await lives_on(site)


async def test_one_connection_too_many_can_read_so_when_its_request_is_out(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(max_connections=1)
    first = await Raw.to(site)
    second = await Raw.to(site)
    for part in (GET[:10], GET[10:], GET):
        await asyncio.sleep(0.05)
        await second.send(part)
    await refused(second, 429, "overloaded")
    await first.close()


async def test_those_turned_away_do_not_keep_others_out(open_site: OpenSite) -> None:
    site: Site = await open_site(max_connections=2)
    first = [await Raw.to(site) for _ in range(2)]
    turned_away = [await Raw.to(site) for _ in range(4)]
    for raw in turned_away:
        assert (await raw.answer())[0] == 429
    for raw in first:
        await raw.close()
    await asyncio.sleep(0.05)
    third = await Raw.to(site, GET)
    assert (await third.answer())[0] == 200
    for raw in (*turned_away, third):
        await raw.close()


async def test_a_request_is_answered_once(open_site: OpenSite) -> None:
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site, GET[:-2] + b"transfer-encoding: chunked\r\n\r\n")
    assert (await raw.answer())[0] == 200
    await raw.send(b"no chunk\r\n")
    assert await raw.end() == b""
    await raw.close()


async def test_a_refused_body_is_not_asked_for(open_site: OpenSite) -> None:
    site: Site = await open_site(**QUICK)
    chunked = post(b"", b"expect: 100-continue").replace(
        b"content-length: 0", b"transfer-encoding: chunked"
    )
    await refused(await Raw.to(site, chunked + b"no chunk\r\n"), 400, "invalid_value")
    assert site.metric("headrace_requests_total", endpoint="/v1/completions", status="499") == 1


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
async def test_nothing_is_kept_of_a_client_that_left(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch, resets: bool
) -> None:
    made: list[weakref.ref[Connection]] = []
    connection_made = Connection.connection_made

    def note(connection: Connection, transport: asyncio.Transport) -> None:
        made.append(weakref.ref(connection))
        connection_made(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", note)
    site: Site = await open_site()
    gc.disable()
    try:
        for _ in range(3):
            raw = await Raw.to(site, GET)
            assert (await raw.answer())[0] == 200
            if resets:
                raw.reset_on_close()
            await raw.close()
        await until(lambda: not any(it() for it in made))
    finally:
        gc.enable()
    assert len(made) == 3


async def test_who_never_stops_writing_is_hung_up_on(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.connection._LINGER_MOST_S", 0.3)
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site, b"no HTTP\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        await raw.flood(b"a" * 60_000)
    await raw.close()


async def test_a_long_body_that_was_answered_may_take_its_time(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.connection._LINGER_S", 0.2)
    site: Site = await open_site()
    raw = await Raw.to(site, GET[:-2] + b"content-length: 20\r\n\r\n")
    assert (await raw.answer())[0] == 200
    await raw.drip(b" " * 20, 0.05)
    await raw.send(GET)
    assert (await raw.answer())[0] == 200
    await raw.close()


async def test_endless_headers_take_no_memory(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.connection._LINGER_MOST_S", 0.1)
    site: Site = await open_site(**QUICK)
    process, tasks = psutil.Process(), len(asyncio.all_tasks())
    before = process.memory_info().rss
    for line in (b"x: " + b"a" * 60_000 + b"\r\n", b"a" * 60_000):
        raws = [await Raw.to(site, GET[:-2] + b"y: ") for _ in range(20)]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(raw.flood(line) for raw in raws))
        for raw in raws:
            await raw.close()
    assert process.memory_info().rss - before < 64 << 20
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_slow_headers_are_408(open_site: OpenSite) -> None:
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site)
    dripping = asyncio.create_task(raw.drip(GET, 0.05))
    await refused(raw, 408, "request_timeout")
    await dripping
    await lives_on(site)


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "an empty line"])
async def test_idle_connections_end(open_site: OpenSite, sent: bytes) -> None:
    site: Site = await open_site(**QUICK)
    tasks = len(asyncio.all_tasks())
    raws = [await Raw.to(site, sent) for _ in range(200)]
    assert await asyncio.gather(*(raw.end() for raw in raws)) == [b""] * 200
    for raw in raws:
        await raw.close()
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
    await lives_on(site)


async def test_an_empty_line_after_an_answer_does_not_keep_the_connection(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site, GET)
    assert (await raw.answer())[0] == 200
    await raw.send(b"\r\n")
    assert await raw.end() == b""
    await raw.close()


async def test_more_connections_than_allowed(open_site: OpenSite) -> None:
    site: Site = await open_site(max_connections=3)
    raws = [await Raw.to(site) for _ in range(3)]
    await refused(await Raw.to(site), 429, "overloaded")
    for raw in raws:
        await raw.close()
    await asyncio.sleep(0.05)
    await lives_on(site)


@pytest.mark.parametrize("start", [post(b"{", length=100), post(b"")[:-4] + b"9\r\n\r\n"])
async def test_a_body_that_stalls_is_408(open_site: OpenSite, start: bytes) -> None:
    site: Site = await open_site(**QUICK)
    await refused(await Raw.to(site, start), 408, "request_timeout")
    assert site.metric("headrace_requests_total", endpoint="/v1/completions", status="408") == 1


async def test_a_body_that_drips_is_408(open_site: OpenSite) -> None:
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site, post(b"", length=1000))
    dripping = asyncio.create_task(raw.drip(b" " * 1000, 0.05))
    await refused(raw, 408, "request_timeout")
    await dripping


async def test_the_rest_of_a_body_nobody_reads_ends(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.connection._LINGER_MOST_S", 0.3)
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site, GET[:-2] + b"content-length: 1000000\r\n\r\n")
    assert (await raw.answer())[0] == 200
    dripping = asyncio.create_task(raw.drip(b" " * 1000, 0.05))
    assert await raw.end() == b""
    await dripping
    await raw.close()


async def test_a_late_body_of_an_answered_request_leaves_the_connection_usable(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(**QUICK)
    raw = await Raw.to(site, GET[:-2] + b"content-length: 2\r\n\r\n")
    assert (await raw.answer())[0] == 200
    await raw.send(b"{}" + GET)
    assert (await raw.answer())[0] == 200
    await raw.send(GET[:-2] + b"content-length: 2\r\n\r\n")
    assert (await raw.answer())[0] == 200
    await raw.send(b"{}")
    assert await raw.end() == b"", "it is idle, and ends"
    await raw.close()


async def test_requests_sent_ahead_are_bounded(site: Site) -> None:
    site.worker.script = endless
    raw = await Raw.to(site, post(STREAM))
    await site.router.started(1)
    before = psutil.Process().memory_info().rss
    async with asyncio.timeout(PATIENCE_S):
        await raw.flood(GET * 10_000)
    await raw.close()
    await site.router.settled()
    assert psutil.Process().memory_info().rss - before < 32 << 20


async def test_a_few_sent_ahead_are_answered_in_turn(site: Site) -> None:
    site.worker.script = say(5)
    body = json.dumps({"prompt": "x"}).encode()
    raw = await Raw.to(site, post(body) + GET * 5 + post(body))
    objects = [(await raw.answer())[2].get("object") for _ in range(7)]
    assert objects == ["text_completion", *[None] * 5, "text_completion"]
    await raw.close()


async def test_what_follows_a_running_answer_never_breaks_into_it(site: Site) -> None:
    site.worker.script = endless
    raw = await Raw.to(site, post(STREAM))
    async with asyncio.timeout(PATIENCE_S):
        await raw.reader.readuntil(b"data: ")
    await raw.send(b"no http at all\r\n\r\n")
    assert b"HTTP/1.1 400" not in await raw.end()
    await raw.close()
    await site.router.settled()


async def test_a_client_that_leaves_with_requests_sent_ahead_cancels(site: Site) -> None:
    site.worker.script = endless
    raw = await Raw.to(site, post(STREAM))
    async with asyncio.timeout(PATIENCE_S):
        await raw.reader.readuntil(b"data: ")
    await raw.send(GET)
    await raw.close()
    await site.router.settled()
    async with asyncio.timeout(PATIENCE_S):  # the worker hears of it when it does
        await site.worker.streams[0].cancelled.wait()


async def test_half_a_request_behind_a_long_answer_waits_for_its_turn(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(**QUICK)
    site.worker.script = say(5, 5, 5, 5, 5, pause_s=0.15)
    body = json.dumps({"prompt": "x"}).encode()
    raw = await Raw.to(site, post(body) + GET[:10])
    assert (await raw.answer())[0] == 200
    await raw.send(GET[10:])
    assert (await raw.answer())[0] == 200
    await raw.close()


async def test_a_client_that_never_reads_is_hung_up_on(open_site: OpenSite) -> None:
    site: Site = await open_site(deadline_s=1.0, write_timeout_s=1.0)
    site.worker.script = endless
    host, port = site.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(post(STREAM))
        await site.router.started(1)
        await site.router.settled()
        await until(lambda: not connections_to(int(port)), PATIENCE_S)


@pytest.mark.parametrize(
    "data",
    [
        post(b"{}", b"transfer-encoding: chunked"),
        post(b"{}", b"content-length: 3"),
        post(b"{}").replace(b"content-length:", b"content-length :"),
        GET.replace(b"\r\n", b"\n"),
        GET[:-2] + b"x: a\r\n b\r\n\r\n",
        GET[:-2] + b"x: a\x00b\r\n\r\n",
        b"GET http://evil HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT evil:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked") + b"zz\r\n",
    ],
    ids=repr,
)
async def test_what_is_no_http_is_refused_in_the_same_shape(site: Site, data: bytes) -> None:
    await refused(await Raw.to(site, data), 400, "invalid_value")
    assert site.metric("headrace_requests_total", endpoint="unknown", status="400") == 1


async def test_an_offer_of_http2_does_not_cost_the_body(site: Site) -> None:
    site.worker.script = say(5)
    offer = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABk")
    body = json.dumps({"prompt": "x"}).encode()
    request = post(body, *offer)
    for chunks in ([request], [request[:-5], request[-5:]], [request + request]):
        raw = await Raw.to(site, *chunks)
        for _ in range(len(b"".join(chunks)) // len(request)):
            assert (await raw.answer())[0] == 200
        await raw.close()
    assert (await (await Raw.to(site, post(b"{", *offer))).answer())[0] == 400


async def test_a_websocket_is_not_spoken(site: Site) -> None:
    offer = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    raw = await Raw.to(site, GET[:-2] + offer)
    assert (await raw.answer())[0] == 200
    await raw.close()


async def test_a_trailer_is_no_header(site: Site) -> None:
    site.worker.script = say(5)
    body = json.dumps({"prompt": "x"}).encode()
    chunked = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    ending = b"0\r\nx-request-id: forged\r\n\r\n"
    raw = await Raw.to(site, chunked + b"%x\r\n%s\r\n" % (len(body), body) + ending)
    status, headers, _ = await raw.answer()
    assert status == 200
    assert headers["x-request-id"] != "forged"
    await raw.close()


async def endless(stream: FakeStream) -> None:
    while not stream.cancelled.is_set():
        await stream.tokens(*range(300, 308))
        await asyncio.sleep(0.001)


def connections_to(port: int) -> list[Any]:
    """The server's ends of connections on a port that are still held by this process."""
    return [
        c
        for c in psutil.Process().net_connections("tcp")
        if c.laddr.port == port and c.status != psutil.CONN_LISTEN
    ]
