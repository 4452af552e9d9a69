"""End of a connection: errors that clients can read, bounded linger, no leaks."""

import asyncio
import gc
import weakref

import pytest

from services.gateway.http.connection import Connection
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import until
from tests.services.gateway.raw import (
    GET,
    SHORT_TIMEOUTS,
    TIMEOUT_S,
    Raw,
    check_alive,
    check_refused,
    post,
)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (GET[:-2] + b"x: " + b"a" * 5000, 431, "headers_too_large"),
        (b"no HTTP\r\n\r\n", 400, "invalid_value"),
        (post(b"", b"connection: close", length=10**9), 413, "request_too_large"),
    ],
    ids=["headers", "no HTTP", "body"],
)
async def test_client_that_still_writes_can_read_the_error(
    open_site: OpenSite, sent: bytes, status: int, code: str
) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site, sent)
    for _ in range(3):  # if the server did not linger, the second write would get RST
        await asyncio.sleep(0.05)
        await raw.send(b"a" * 1000)
    await check_refused(raw, status, code)
    await check_alive(site)


async def test_rejected_connection_can_read_the_429_after_writing(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(max_connections=1)
    first = await Raw.to(site)
    second = await Raw.to(site)
    for part in (GET[:10], GET[10:], GET):
        await asyncio.sleep(0.05)
        await second.send(part)
    await check_refused(second, 429, "overloaded")
    await first.close()


async def test_rejected_connections_do_not_count_towards_the_limit(open_site: OpenSite) -> None:
    site: Site = await open_site(max_connections=2)
    first = [await Raw.to(site) for _ in range(2)]
    rejected = [await Raw.to(site) for _ in range(4)]
    for raw in rejected:
        assert (await raw.answer())[0] == 429
    for raw in first:
        await raw.close()
    await asyncio.sleep(0.05)
    third = await Raw.to(site, GET)
    assert (await third.answer())[0] == 200
    for raw in (*rejected, third):
        await raw.close()


async def test_request_is_answered_once(open_site: OpenSite) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site, GET[:-2] + b"transfer-encoding: chunked\r\n\r\n")
    assert (await raw.answer())[0] == 200
    await raw.send(b"no chunk\r\n")
    assert await raw.end() == b""
    await raw.close()


async def test_invalid_body_gets_no_100_continue(open_site: OpenSite) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    chunked = post(b"", b"expect: 100-continue").replace(
        b"content-length: 0", b"transfer-encoding: chunked"
    )
    await check_refused(await Raw.to(site, chunked + b"no chunk\r\n"), 400, "invalid_value")
    assert site.metric("headrace_requests_total", endpoint="/v1/completions", status="499") == 1


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
async def test_closed_connection_is_freed_without_garbage_collection(
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


async def test_client_that_never_stops_writing_is_disconnected(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.connection._MAX_LINGER_S", 0.3)
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site, b"no HTTP\r\n\r\n")
    async with asyncio.timeout(TIMEOUT_S):
        await raw.flood(b"a" * 60_000)
    await raw.close()


async def test_slow_body_after_its_response_is_read(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.connection._LINGER_S", 1.0)
    site: Site = await open_site()
    raw = await Raw.to(site, GET[:-2] + b"content-length: 20\r\n\r\n")
    assert (await raw.answer())[0] == 200
    await raw.drip(b" " * 20, 0.1)
    await raw.send(GET)
    assert (await raw.answer())[0] == 200
    await raw.close()


async def test_linger_for_the_rest_of_a_body_is_bounded(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.connection._MAX_LINGER_S", 0.3)
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site, GET[:-2] + b"content-length: 1000000\r\n\r\n")
    assert (await raw.answer())[0] == 200
    dripping = asyncio.create_task(raw.drip(b" " * 1000, 0.05))
    assert await raw.end() == b""
    await dripping
    await raw.close()


async def test_late_body_of_an_answered_request_keeps_the_connection_usable(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(**SHORT_TIMEOUTS)
    raw = await Raw.to(site, GET[:-2] + b"content-length: 2\r\n\r\n")
    assert (await raw.answer())[0] == 200
    await raw.send(b"{}" + GET)
    assert (await raw.answer())[0] == 200
    await raw.send(GET[:-2] + b"content-length: 2\r\n\r\n")
    assert (await raw.answer())[0] == 200
    await raw.send(b"{}")
    assert await raw.end() == b"", "an idle connection is closed"
    await raw.close()
