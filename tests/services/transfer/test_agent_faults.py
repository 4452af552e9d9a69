"""A bug on the transfer thread fails every future and ends the worker."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from services.transfer.agent import TransferAgent
from services.transfer.errors import TransferClosed
from services.transfer.nixl_agent import NixlAgent
from services.transfer.slab import Slab
from tests.services.workers import LIMIT_S, SLOT_BYTES, Site

pytestmark = pytest.mark.slow


class Bug(Exception):
    """An error that is not a TransferError."""


def break_at(name: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make a method of `NixlAgent` raise once the event is set."""
    fall = threading.Event()

    def broken(*_: Any) -> None:
        assert fall.wait(LIMIT_S)
        raise Bug(name)

    monkeypatch.setattr(NixlAgent, name, broken)
    return fall


def reader_and_peer() -> tuple[TransferAgent, TransferAgent, Slab, Slab]:
    reader, peer = TransferAgent("reader"), TransferAgent("peer")
    landing, slab = Slab(2, SLOT_BYTES), Slab(2, SLOT_BYTES)
    reader.register(landing)
    peer.register(slab)
    reader.add_peer("peer", peer.metadata).result(LIMIT_S)
    return reader, peer, landing, slab


@pytest.mark.parametrize("places", [["remove_peer"], ["poll"], ["poll", "_shut_down"]])
def test_bug_on_the_owner_thread_settles_every_future(
    places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, peer, landing, slab = reader_and_peer()
    trigger, *others = [break_at(place, monkeypatch) for place in places]
    for other in others:
        other.set()
    local = landing.view(0, SLOT_BYTES)

    def read() -> "Future[Any]":
        return reader.read("peer", slab.address, SLOT_BYTES, local, deadline_s=LIMIT_S)

    # The first command, or polling after it, raises. The other commands are queued behind it.
    waiting = [reader.remove_peer("x")] if places == ["remove_peer"] else [read()]
    cancelled = read()
    assert cancelled.cancel()
    waiting += [read()]
    removed = reader.remove_peer("peer")
    trigger.set()
    for future in waiting:
        with pytest.raises(TransferClosed):
            future.result(LIMIT_S)
    assert isinstance(removed.exception(LIMIT_S), TransferClosed | None)
    assert isinstance(reader.fault.exception(LIMIT_S), Bug)
    with pytest.raises(TransferClosed):
        read().result(0)
    reader.close()
    peer.close()


def test_agent_whose_thread_hangs_is_abandoned_and_refuses_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = TransferAgent("hanging")
    hanging = threading.Event()
    end = threading.Event()

    def hang(_nixl: NixlAgent, _name: str, future: "Future[None]") -> None:
        hanging.set()
        end.wait(LIMIT_S)
        future.set_result(None)

    monkeypatch.setattr(NixlAgent, "remove_peer", hang)
    monkeypatch.setattr("services.transfer.agent.CLOSE_S", 0.1)
    agent.remove_peer("anyone")
    assert hanging.wait(LIMIT_S)
    idle = agent.codec_idle()
    agent.close(grace_s=0)
    with pytest.raises(TransferClosed):
        idle.result(0)
    end.set()
    agent._thread.join(LIMIT_S)
    assert not agent._thread.is_alive()


async def test_worker_ends_when_its_transfer_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    break_at("remove_peer", monkeypatch).set()
    for worker, agent in ((prefill.worker, prefill.agent), (decode.worker, decode.agent)):
        assert isinstance(agent.remove_peer("anyone").exception(LIMIT_S), TransferClosed)
        with pytest.raises(Bug):
            await asyncio.wait_for(worker.fault, LIMIT_S)
