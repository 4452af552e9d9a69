"""Memory of request bodies: bounded in total, shared among owners, and returned."""

import asyncio
import json
from collections import Counter
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc
from services.common.errors import Overloaded, SettingsError
from services.gateway.buffers import Buffers
from services.gateway.settings import GatewaySettings
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import say, until
from tests.services.gateway.raw import Raw, post

LIMIT = 1 << 16
SMALL = {"max_body_bytes": LIMIT // 4, "max_buffered_bytes": LIMIT}
PART = b" " * 1000


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400)), max_size=60))
def test_owner_holds_at_most_what_is_free(parts: list[tuple[str, int]]) -> None:
    buffers = Buffers(1000)
    with ExitStack() as stack:
        held = Counter[str]()
        grow = {owner: stack.enter_context(buffers.open(owner)) for owner in "abc"}
        for owner, size in parts:
            fits = held[owner] + size <= 1000 - held.total()
            try:
                grow[owner](size)
            except Overloaded:
                assert not fits
            else:
                assert fits
                held[owner] += size
            assert buffers.held == held
    assert not buffers.held


def test_one_owner_leaves_half_for_another() -> None:
    buffers = Buffers(1000)
    with buffers.open("flood") as flood, buffers.open("other") as other:
        flood(500)
        with pytest.raises(Overloaded):
            flood(1)
        other(200)


def test_limit_below_some_bodies_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="four times max_body_bytes"):
        GatewaySettings.load(["--max-buffered-bytes", "1000000"])


async def incomplete(site: Site, address: str = "127.0.0.1") -> Raw:
    """Send most of a body."""
    raw = await Raw.to(site, local=address)
    await raw.send(post(PART * 10, length=len(PART) * 12))
    return raw


async def test_bodies_above_the_limit_are_429_and_other_clients_are_served(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(**SMALL)
    site.worker.script = say(5)
    held = [await incomplete(site) for _ in range(3)]
    await until(lambda: site.gateway.buffers.held.total() == 3 * len(PART) * 10)
    refused = await incomplete(site)
    status, headers, body = await refused.answer()
    assert (status, body["error"]["code"]) == (429, "overloaded")
    assert int(headers["retry-after"]) >= 1
    other = await Raw.to(site, post(json.dumps({"prompt": "x"}).encode()), local="127.0.0.2")
    assert (await other.answer())[0] == 200
    for raw in (*held, refused, other):
        await raw.close()
    await until(lambda: site.gateway.buffers.held.total() == 0)
    response = await site.http.post("/v1/completions", json={"prompt": "x" * 5000})
    assert response.status_code == 200


async def test_memory_is_returned_after_each_outcome(open_site: OpenSite) -> None:
    site: Site = await open_site(**SMALL, body_timeout_s=0.2)
    site.worker.script = say(5)
    bodies: list[Any] = [b"{", b" " * LIMIT, json.dumps({"prompt": "x " * 2000}).encode()]
    for body in bodies:
        await site.http.post("/v1/completions", content=body)
    stalled = await incomplete(site)
    assert (await stalled.answer())[0] == 408
    await stalled.close()
    assert site.gateway.buffers.held.total() == 0


async def test_grpc_messages_use_the_same_memory(open_site: OpenSite) -> None:
    site: Site = await open_site(**SMALL)
    site.worker.script = say(5)
    held = [await incomplete(site) for _ in range(3)]
    await until(lambda: site.gateway.buffers.held.total() == 3 * len(PART) * 10)
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest(text="x" * 6000)).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for raw in held:
        await raw.close()
    await until(lambda: site.gateway.buffers.held.total() == 0)
    async with asyncio.timeout(20):
        assert [r async for r in stub.Generate(pb.GenerateRequest(text="x" * 6000))]
    assert site.gateway.buffers.held.total() == 0
