"""Limits of a connection: headers, bodies, time, pipelining, and invalid HTTP."""

import asyncio
import json
import socket
from typing import Any

import psutil
import pytest

from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import FakeStream, say, until
from tests.services.gateway.raw import (
    GET,
    SHORT_TIMEOUTS,
    TIMEOUT_S,
    Raw,
    allocations,
    check_alive,
    check_refused,
    post,
)

STREAM = json.dumps({"prompt": "x", "max_tokens": 8000, "stream": True}).encode()


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
async def test_large_head_is_431(open_site: OpenSite, head: bytes) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    await check_refused(await Raw.to(site, head), 431, "headers_too_large")
    assert site.metric("headrace_requests_total", endpoint="unknown", status="431") == 1
    await check_alive(site)


async def test_head_within_the_limit_is_accepted(open_site: OpenSite) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site, GET[:-2] + b"x: " + b"a" * 3900, b"\r\n\r\n")
    assert (await raw.answer())[0] == 200
    for _ in range(3):  # the limit applies to each request of a connection
        await raw.send(GET[:-2] + b"x: " + b"a" * 3900 + b"\r\n\r\n")
        assert (await raw.answer())[0] == 200
    await raw.close()


@pytest.mark.parametrize(
    "framing",
    [b"1;" + b"a" * 5000, b"1\r\n{\r\n0\r\nx: " + b"a" * 5000],
    ids=["chunk extension", "trailer"],
)
async def test_framing_of_a_body_is_bounded(open_site: OpenSite, framing: bytes) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS | {"body_timeout_s": TIMEOUT_S})
    chunked = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    raw = await Raw.to(site, chunked + framing)
    await asyncio.sleep(0.05)
    await raw.send(b"a" * 5000)
    await check_refused(raw, 431, "headers_too_large")


async def test_endless_headers_do_not_use_memory(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.connection._MAX_LINGER_S", 0.1)
    site: Site = await open_site(**SHORT_TIMEOUTS)
    tasks = len(asyncio.all_tasks())
    with allocations() as peak:
        for line in (b"x: " + b"a" * 60_000 + b"\r\n", b"a" * 60_000):
            raws = [await Raw.to(site, GET[:-2] + b"y: ") for _ in range(20)]
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*(raw.flood(line) for raw in raws))
            for raw in raws:
                await raw.close()
    assert peak() < 64 << 20
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_slow_headers_are_408(open_site: OpenSite) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site)
    dripping = asyncio.create_task(raw.drip(GET, 0.05))
    await check_refused(raw, 408, "request_timeout")
    await dripping
    await check_alive(site)


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "an empty line"])
async def test_idle_connections_are_closed(open_site: OpenSite, sent: bytes) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    tasks = len(asyncio.all_tasks())
    raws = [await Raw.to(site, sent) for _ in range(200)]
    assert await asyncio.gather(*(raw.end() for raw in raws)) == [b""] * 200
    for raw in raws:
        await raw.close()
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
    await check_alive(site)


async def test_empty_line_after_a_response_does_not_keep_the_connection(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site, GET)
    assert (await raw.answer())[0] == 200
    await raw.send(b"\r\n")
    assert await raw.end() == b""
    await raw.close()


async def test_connections_above_the_limit_are_429(open_site: OpenSite) -> None:
    site: Site = await open_site(max_connections=3)
    raws = [await Raw.to(site) for _ in range(3)]
    await check_refused(await Raw.to(site), 429, "overloaded")
    for raw in raws:
        await raw.close()
    await asyncio.sleep(0.05)
    await check_alive(site)


@pytest.mark.parametrize("start", [post(b"{", length=100), post(b"")[:-4] + b"9\r\n\r\n"])
async def test_stalled_body_is_408(open_site: OpenSite, start: bytes) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    await check_refused(await Raw.to(site, start), 408, "request_timeout")
    assert site.metric("headrace_requests_total", endpoint="/v1/completions", status="408") == 1


async def test_slow_body_is_408(open_site: OpenSite) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site, post(b"", length=1000))
    dripping = asyncio.create_task(raw.drip(b" " * 1000, 0.05))
    await check_refused(raw, 408, "request_timeout")
    await dripping


async def test_pipelined_requests_are_bounded(site: Site) -> None:
    site.worker.script = endless
    raw = await Raw.to(site, post(STREAM))
    await site.router.started(1)
    flood = GET * 10_000
    with allocations() as peak:
        async with asyncio.timeout(TIMEOUT_S):
            await raw.flood(flood)
        await raw.close()
        await site.router.settled()
    assert peak() < 32 << 20


async def test_pipelined_requests_are_answered_in_order(site: Site) -> None:
    site.worker.script = say(5)
    body = json.dumps({"prompt": "x"}).encode()
    raw = await Raw.to(site, post(body) + GET * 5 + post(body))
    objects = [(await raw.answer())[2].get("object") for _ in range(7)]
    assert objects == ["text_completion", *[None] * 5, "text_completion"]
    await raw.close()


async def test_invalid_pipelined_request_does_not_corrupt_a_running_response(site: Site) -> None:
    site.worker.script = endless
    raw = await Raw.to(site, post(STREAM))
    async with asyncio.timeout(TIMEOUT_S):
        await raw.reader.readuntil(b"data: ")
    await raw.send(b"no http at all\r\n\r\n")
    assert b"HTTP/1.1 400" not in await raw.end()
    await raw.close()
    await site.router.settled()


async def test_disconnect_with_pipelined_requests_cancels_the_stream(site: Site) -> None:
    site.worker.script = endless
    raw = await Raw.to(site, post(STREAM))
    async with asyncio.timeout(TIMEOUT_S):
        await raw.reader.readuntil(b"data: ")
    await raw.send(GET)
    await raw.close()
    await site.router.settled()
    async with asyncio.timeout(TIMEOUT_S):  # cancellation follows the disconnect asynchronously
        await site.worker.streams[0].cancelled.wait()


async def test_partial_pipelined_request_does_not_time_out_during_a_response(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    site.worker.script = say(5, 5, 5, 5, 5, pause_s=0.15)
    body = json.dumps({"prompt": "x"}).encode()
    raw = await Raw.to(site, post(body) + GET[:10])
    assert (await raw.answer())[0] == 200
    await raw.send(GET[10:])
    assert (await raw.answer())[0] == 200
    await raw.close()


async def test_client_that_never_reads_is_disconnected(open_site: OpenSite) -> None:
    site: Site = await open_site(deadline_s=1.0, write_timeout_s=1.0)
    site.worker.script = endless
    host, port = site.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(post(STREAM))
        await site.router.started(1)
        await site.router.settled()
        await until(lambda: not connections_to(int(port)), TIMEOUT_S)


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
async def test_invalid_http_is_400_in_the_error_format(site: Site, data: bytes) -> None:
    await check_refused(await Raw.to(site, data), 400, "invalid_value")
    assert site.metric("headrace_requests_total", endpoint="unknown", status="400") == 1


async def test_offer_to_upgrade_to_http2_is_ignored(site: Site) -> None:
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


async def test_websocket_upgrade_is_ignored(site: Site) -> None:
    offer = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    raw = await Raw.to(site, GET[:-2] + offer)
    assert (await raw.answer())[0] == 200
    await raw.close()


async def test_trailer_is_not_a_header(site: Site) -> None:
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
    """Return the server's sockets of open connections on a port."""
    return [
        c
        for c in psutil.Process().net_connections("tcp")
        if c.laddr.port == port and c.status != psutil.CONN_LISTEN
    ]
