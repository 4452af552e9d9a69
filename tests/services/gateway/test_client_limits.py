"""Connections and calls are bounded for each client address, also behind trusted proxies."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc
from services.common.errors import SettingsError
from services.gateway.settings import GatewaySettings
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import hang, say
from tests.services.gateway.raw import GET, Raw, check_refused, post

SLOW = GET[:10]
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()


async def test_slow_connections_of_one_address_leave_room_for_others(open_site: OpenSite) -> None:
    site: Site = await open_site(max_connections=8, max_client_connections=4)
    slow = [await Raw.to(site, SLOW, local="127.0.0.2") for _ in range(4)]
    await check_refused(await Raw.to(site, SLOW, local="127.0.0.2"), 429, "overloaded")
    for _ in range(2):
        other = await Raw.to(site, GET)
        assert (await other.answer())[0] == 200
        await other.close()
    await slow.pop().close()
    await asyncio.sleep(0.05)
    again = await Raw.to(site, GET, local="127.0.0.2")
    assert (await again.answer())[0] == 200
    for raw in (*slow, again):
        await raw.close()


async def test_address_in_a_header_of_an_untrusted_peer_changes_nothing(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(max_client_connections=2, trusted_proxies=["192.0.2.0/24"])
    forged = GET[:-2] + b"x-forwarded-for: 203.0.113.%d\r\n\r\n"
    held = [await Raw.to(site, forged % at) for at in range(2)]
    await check_refused(await Raw.to(site, forged % 3), 429, "overloaded")
    for raw in held:
        await raw.close()


def behind_proxy(client: bytes, *before: bytes) -> bytes:
    return post(STREAM, b"x-forwarded-for: " + b", ".join((*before, client)))


async def test_requests_through_a_trusted_proxy_are_bounded_per_client(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(max_client_connections=2, trusted_proxies=["127.0.0.0/8"])
    site.worker.script = hang
    idle = [await Raw.to(site) for _ in range(4)]  # connections of the proxy are not bounded
    streams = [await Raw.to(site, behind_proxy(b"203.0.113.1")) for _ in range(2)]
    await site.router.started(2)
    third = await Raw.to(site, behind_proxy(b"203.0.113.1", b"203.0.113.9"))
    status, headers, body = await third.answer()
    assert (status, body["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
    site.worker.script = say(5)
    other = await Raw.to(site, behind_proxy(b"203.0.113.2"))
    assert b"[DONE]" in await other.reader.readuntil(b"[DONE]")
    health = await Raw.to(site, GET)
    assert (await health.answer())[0] == 200, "the proxy's own requests"
    for raw in (*idle, *streams, third, other, health):
        await raw.close()
    await site.router.settled()


async def test_finished_requests_do_not_count(open_site: OpenSite) -> None:
    site: Site = await open_site(max_client_connections=1, trusted_proxies=["127.0.0.1"])
    headers = {"x-forwarded-for": "203.0.113.1"}
    for _ in range(3):
        assert (await site.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await site.http.get("/absent", headers=headers)).status_code == 404


@pytest.mark.parametrize("proxies", [[], ["127.0.0.1"]])
async def test_grpc_calls_are_bounded_per_client(open_site: OpenSite, proxies: list[str]) -> None:
    site: Site = await open_site(max_client_connections=2, trusted_proxies=proxies)
    site.worker.script = hang
    stub = inference_pb2_grpc.InferenceStub(site.rpc)

    def call(client: str) -> Any:
        metadata = (("x-forwarded-for", client),)
        return stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata)

    calls = [asyncio.ensure_future(call("203.0.113.1").read()) for _ in range(2)]
    await site.router.started(2)
    with pytest.raises(aio.AioRpcError) as caught:
        await call("203.0.113.1").read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    site.worker.script = say(5)
    if proxies:
        assert await call("203.0.113.2").read()
    else:
        with pytest.raises(aio.AioRpcError):
            await call("203.0.113.2").read()
    for one in calls:
        one.cancel()
        with suppress(asyncio.CancelledError):
            await one


def test_invalid_proxy_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="trusted_proxies"):
        GatewaySettings.load(["--trusted-proxies", "10.0.0.0/33"])
