"""Faults between two workers leak no slots, pages or peers, and corrupt no pages."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.engine import Engine
from runtime.pages.plan import PAGE_SIZE
from services.transfer import sender
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.errors import PeerLost
from services.transfer.fetch import FetchFailed
from services.worker.streams import Stream
from tests.services.workers import (
    LIMIT_S,
    Decode,
    Prefill,
    Site,
    fetch_of,
    open_stream,
    until,
)

TOKENS = 100  # four segments; two of three landing slots are for one prefill worker


class HeldReads(TransferAgent):
    """Runs READs, and reports their results only after `report_all`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.held: list[tuple[Future[ReadDone], Future[ReadDone]]] = []

    def read(self, *args: object, **kwargs: object) -> "Future[ReadDone]":
        heard: Future[ReadDone] = Future()
        self.held.append((super().read(*args, **kwargs), heard))  # type: ignore[arg-type]
        return heard

    def report_all(self) -> None:
        for done, heard in self.held:
            heard.set_result(done.result(LIMIT_S))
        self.held.clear()


async def reading(decode: Decode, prefill: Prefill, number: int) -> tuple[Stream, HeldReads]:
    """Return a stream with both of its READs in flight."""
    agent = decode.agent
    assert isinstance(agent, HeldReads)
    stream = open_stream(decode, prefill, number, TOKENS)
    await until(lambda: len(agent.held) == 2)
    return stream, agent


async def wait_until_all_is_free(decode: Decode, prefill: Prefill) -> None:
    engine, sender = decode.worker.engine, prefill.worker.sender
    await until(lambda: decode.landing_slots() == {"held": 0, "quarantined": 0})
    await until(lambda: engine.load.pages_free == engine.pages_total)
    await until(lambda: prefill.worker.idle and not sender.active and not sender.slots_in_use)


async def test_dropped_stream_writes_nothing_to_its_freed_pages(site: Site) -> None:
    """The stream is dropped at each point between a READ's end and the segment's decode."""
    prefill, decode = await site.prefill(), await site.decode(HeldReads, slots=3)
    thread = decode.worker.engine

    def overwrite(_: Engine) -> None:
        for plane in decode.planes():
            plane.fill_(7)

    for steps in range(8):
        stream, agent = await reading(decode, prefill, steps + 1)
        agent.report_all()
        for _ in range(steps):
            await asyncio.sleep(0)
        stream.session.end(stream)
        while await thread.run(lambda engine: engine.scheduler.pages.free) != thread.pages_total:
            pass
        await thread.run(overwrite)  # as the next owner of these pages would
        agent.report_all()
        await wait_until_all_is_free(decode, prefill)
        assert all(bool((plane == 7).all()) for plane in decode.planes()), steps


async def test_prefill_is_requested_early_only_if_ample_pages_are_free(site: Site) -> None:
    """Reservations that are not made yet count as well as those of running sequences."""
    prefill = await site.prefill(started=False)
    decode = await site.decode(started=False, slots=2)
    worker = decode.worker
    assert worker.service._has_room()
    stream = open_stream(decode, prefill, 1, TOKENS)
    await until(lambda: prefill.worker.sender.active == 1)
    assert stream.reserved is not None
    assert not stream.reserved.done(), "the engine has not started"
    assert worker.service._has_room()
    request = stream.request
    more = (1,) * (worker.engine.load.pages_free[0] // 2 * PAGE_SIZE)
    stream.request = replace(request, tokens=request.tokens + more)
    assert not worker.service._has_room()
    stream.request = request
    decode.worker.engine.start()
    await until(stream.reserved.done)
    assert not prefill.worker.engine.load.steps, "pages are reserved before the prompt is computed"
    prefill.worker.engine.start()
    await until(lambda: decode.worker.idle)


async def test_computation_announced_twice_fails_the_fetch(site: Site) -> None:
    prefill, decode = await site.prefill(started=False), await site.decode()
    fetching = asyncio.create_task(decode.worker.receiver.fetch(fetch_of(prefill, TOKENS)))
    await until(lambda: prefill.worker.sender.active == 1)
    (job,) = prefill.worker.jobs.values()
    for _ in range(2):
        job.session.computing(job)
    with pytest.raises(FetchFailed, match="announced twice"):
        await asyncio.wait_for(fetching, LIMIT_S)


@pytest.mark.parametrize("moment", ["handshake", "transfer"])
async def test_ended_agent_of_the_reader_is_not_the_fault_of_the_sender(
    site: Site, moment: str
) -> None:
    """For a worker of several ranks, the agent of another rank ends with its process."""
    prefill, decode = await site.prefill(started=False), await site.decode()
    if moment == "handshake":
        decode.agent.close()
    fetching = asyncio.create_task(decode.worker.receiver.fetch(fetch_of(prefill, TOKENS)))
    if moment == "transfer":
        await until(lambda: prefill.worker.sender.active == 1)
        decode.agent.close()
        prefill.worker.engine.start()
    with pytest.raises(FetchFailed) as failure:
        await asyncio.wait_for(fetching, LIMIT_S)
    found = failure.value
    assert (found.code, found.worker_id) == (error_pb2.ERROR_CODE_INTERNAL, ""), found.message


async def test_pages_wait_for_decodes_of_a_fetch_that_is_cancelled_twice(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await site.prefill(started=False), await site.decode()
    idle: Future[None] = Future()
    monkeypatch.setattr(decode.agent, "codec_idle", lambda: idle)
    fetching = asyncio.create_task(decode.worker.receiver.fetch(fetch_of(prefill, TOKENS)))
    await until(lambda: prefill.worker.sender.active == 1)
    for _ in range(2):
        fetching.cancel()
        await asyncio.sleep(0.01)
        assert not fetching.done()
    idle.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await fetching


async def test_dropped_streams_landing_slots_wait_for_its_reads(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode(HeldReads, slots=3)
    stream, agent = await reading(decode, prefill, 1)
    assert decode.landing_slots() == {"held": 2, "quarantined": 0}
    stream.session.end(stream)
    await until(lambda: decode.landing_slots() == {"held": 0, "quarantined": 2})
    agent.report_all()
    await wait_until_all_is_free(decode, prefill)


class NeverReportsAddition(TransferAgent):
    """Adds its first peer, but never completes the future."""

    slow = True

    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        added = super().add_peer(name, metadata)
        if not self.slow:
            return added
        added.result(LIMIT_S)
        self.slow = False
        return Future()


async def test_handshake_timeout_leaves_no_peer(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode(NeverReportsAddition, handshake_s=3.0)
    receiver, agent = decode.worker.receiver, decode.agent
    with pytest.raises(FetchFailed) as failed:
        await receiver.fetch(fetch_of(prefill, TOKENS))
    assert failed.value.code == error_pb2.ERROR_CODE_TRANSFER_FAILED
    assert isinstance(agent, NeverReportsAddition)
    assert not agent.slow
    slot = decode.slab.view(0, 64)
    with pytest.raises(PeerLost, match="is not known"):
        agent.read(prefill.agent.name, 0, 64, slot, deadline_s=1).result(LIMIT_S)
    decode.worker._clients._handshake_s = LIMIT_S
    assert (await receiver.fetch(fetch_of(prefill, TOKENS))).segments == 4


async def test_peer_lost_by_nixl_is_reached_through_a_new_session(site: Site) -> None:
    """The old gRPC session would still work, but its READs would fail."""
    prefill, decode = await site.prefill(), await site.decode()
    receiver = decode.worker.receiver
    assert (await receiver.fetch(fetch_of(prefill, TOKENS))).segments == 4
    decode.agent.remove_peer(prefill.agent.name).result(LIMIT_S)
    with pytest.raises(FetchFailed) as failed:
        await receiver.fetch(fetch_of(prefill, TOKENS))
    assert failed.value.code == error_pb2.ERROR_CODE_PREFILL_LOST
    assert failed.value.worker_id == prefill.address.worker_id
    assert (await receiver.fetch(fetch_of(prefill, TOKENS))).segments == 4
    await wait_until_all_is_free(decode, prefill)


@pytest.mark.parametrize("field", ["rank", "reader_rank"])
async def test_segment_of_an_unknown_rank_fails_the_fetch(
    site: Site, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    entry = sender._manifest_entry

    def foreign(*arguments: Any) -> pb.Segment:
        segment = entry(*arguments)
        setattr(segment, field, 1)
        return segment

    prefill, decode = await site.prefill(), await site.decode()
    monkeypatch.setattr(sender, "_manifest_entry", foreign)
    with pytest.raises(FetchFailed, match="rank 1") as failed:
        await asyncio.wait_for(decode.worker.receiver.fetch(fetch_of(prefill, TOKENS)), LIMIT_S)
    assert failed.value.code == error_pb2.ERROR_CODE_INTEGRITY
    await wait_until_all_is_free(decode, prefill)
