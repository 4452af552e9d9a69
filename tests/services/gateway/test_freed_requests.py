"""Requests are freed as soon as they end, without a garbage collection."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc
from services.gateway.generation import Generator
from services.gateway.prompts import PromptTokenizer
from services.gateway.rpc import InferenceServicer
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import completion
from tests.services.gateway.fakes import FakeStream, until


class _Held:
    """An object in a frame that handles a request. It exists as long as the frame does."""


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_refused_requests_are_freed_without_a_garbage_collection(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[weakref.ref[_Held]] = []
    for owner, name in ((InferenceServicer, "_generate"), (PromptTokenizer, "encode_prompt")):
        monkeypatch.setattr(owner, name, held_during(getattr(owner, name), handled))
    text = "hello " * 100_000
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    with without_collections():
        with pytest.raises(aio.AioRpcError):
            await stub.Generate(pb.GenerateRequest(text=text)).read()
        assert (await site.http.post("/v1/completions", json={"prompt": text})).status_code == 400
        await until(lambda: [held() for held in handled] == [None] * 3, 5)


def held_by_generations(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[_Held]]:
    """Put an object into a frame of each generation, and return references to these objects."""
    handled: list[weakref.ref[_Held]] = []
    run = Generator.run

    async def wrapped(self: Generator, *arguments: Any) -> Any:
        held = _Held()
        handled.append(weakref.ref(held))
        async for deltas in run(self, *arguments):
            yield deltas

    monkeypatch.setattr(Generator, "run", wrapped)
    return handled


async def never_ends(stream: FakeStream) -> None:
    """Generate five tokens, then wait until the stream is cancelled."""
    await stream.tokens(5, 5)
    await stream.cancelled.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("deadline_s", [20.0, 1.0], ids=["disconnect", "deadline"])
async def test_generations_that_end_early_are_freed_without_a_garbage_collection(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch, deadline_s: float, stream: bool
) -> None:
    handled = held_by_generations(monkeypatch)
    site: Site = await open_site(deadline_s=deadline_s)
    site.worker.script = never_ends
    with without_collections():
        asking = asyncio.create_task(completion(site, stream=stream))
        await until(lambda: bool(site.worker.streams), 20)
        if deadline_s > 1:
            asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: [held() for held in handled] == [None], 20)


@pytest.mark.parametrize("end", ["cancel", "deadline", "unexpected error"])
async def test_grpc_calls_that_end_early_are_freed_without_a_garbage_collection(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    handled = held_by_generations(monkeypatch)
    site: Site = await open_site(deadline_s=1.0 if end == "deadline" else 20.0)
    site.worker.script = never_ends

    async def fail(*_: object) -> None:
        raise KeyError("unexpected")

    if end == "unexpected error":
        monkeypatch.setattr(site.gateway._placer, "place", fail)
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    with without_collections():
        call = stub.Generate(pb.GenerateRequest(text="x", max_tokens=10))
        with suppress(aio.AioRpcError, asyncio.CancelledError):
            async for _ in call:
                if end == "cancel":
                    call.cancel()
        await until(lambda: [held() for held in handled] == [None], 20)


def held_during(call: Any, handled: list[weakref.ref[_Held]]) -> Any:
    """Return ``call`` with an object in the frame of its caller."""

    async def wrapped(*arguments: Any, **named: Any) -> Any:
        held = _Held()
        handled.append(weakref.ref(held))
        return await call(*arguments, **named)

    return wrapped
