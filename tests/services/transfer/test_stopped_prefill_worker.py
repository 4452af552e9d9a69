"""READs that do not end: one stopped prefill worker leaves landing slots for the others."""

import asyncio
from concurrent.futures import Future

import pytest

from headrace.v1 import error_pb2
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.errors import ReadTimeout
from services.transfer.fetch import FetchFailed
from tests.services.workers import LIMIT_S, Decode, Prefill, Site, fetch_of, until

TOKENS = 100  # four segments


class StuckReads(TransferAgent):
    """READs from the peers in ``stopped`` are overdue after `expire`, and end with `resume`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.stopped: set[str] = set()
        self.running: list[Future[ReadDone]] = []
        self._drained: list[Future[None]] = []

    def read(self, peer: str, *args: object, **kwargs: object) -> "Future[ReadDone]":
        if peer not in self.stopped:
            return super().read(peer, *args, **kwargs)  # type: ignore[arg-type]
        self.running.append(Future())
        return self.running[-1]

    def expire(self) -> None:
        for read in self.running:
            self._drained.append(Future())
            read.set_exception(ReadTimeout("stopped", self._drained[-1]))
        self.running.clear()

    def resume(self) -> None:
        for drained in self._drained:
            drained.set_result(None)


async def stop(prefill: Prefill, decode: Decode, slots: int) -> None:
    """Let READs into ``slots`` landing slots become overdue."""
    agent, receiver = decode.agent, decode.worker.receiver
    assert isinstance(agent, StuckReads)
    agent.stopped.add(prefill.agent.name)
    fetching = asyncio.create_task(receiver.fetch(fetch_of(prefill, TOKENS, first_page=20)))
    await until(lambda: len(agent.running) == slots)
    overdue = receiver.landing[0].overdue + slots
    agent.expire()
    with pytest.raises(FetchFailed) as failed:
        await fetching
    await until(lambda: receiver.landing[0].overdue == overdue)
    assert failed.value.code == error_pb2.ERROR_CODE_TRANSFER_FAILED


async def test_stopped_prefill_worker_does_not_disable_a_decode_worker(site: Site) -> None:
    stopped, live = await site.prefill(slots=8), await site.prefill()
    decode = await site.decode(StuckReads, slots=4)
    await stop(stopped, decode, slots=3)
    receiver = decode.worker.receiver
    async with asyncio.timeout(LIMIT_S):
        assert (await receiver.fetch(fetch_of(live, TOKENS))).segments == 4
    assert receiver.landing[0].overdue == 3
    assert decode.worker.not_ready is None


async def test_decode_worker_without_landing_slots_is_not_ready(site: Site) -> None:
    first, second = await site.prefill(slots=8), await site.prefill(slots=8)
    decode = await site.decode(StuckReads, slots=4)
    await stop(first, decode, slots=3)
    assert decode.worker.not_ready is None
    await stop(second, decode, slots=1)
    assert decode.worker.not_ready == (
        "4 of 4 landing slots are held by prefill workers that do not answer"
    )
    agent = decode.agent
    assert isinstance(agent, StuckReads)
    agent.resume()
    agent.stopped.clear()
    async with asyncio.timeout(LIMIT_S):
        await decode.worker.receiver.fetch(fetch_of(first, TOKENS))
    assert decode.worker.not_ready is None
    await until(lambda: decode.landing_slots() == {"held": 0, "quarantined": 0})
