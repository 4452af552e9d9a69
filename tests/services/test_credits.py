"""Landing space goes to what is computed: a prompt that waits elsewhere holds none of it."""

import asyncio

import pytest

from headrace.v1 import prefill_pb2 as pb
from headrace.v1.prefill_pb2_grpc import PrefillStub
from services.common.grpc_server import next_message, open_channel
from tests.services.workers import (
    LIMIT_S,
    SLOT_BYTES,
    Prefill,
    Site,
    fetch_of,
    load,
    start_of,
    until,
)

TOKENS = 100  # four segments, through two landing slots


async def test_a_queued_prompt_holds_no_landing_slot_that_another_needs(site: Site) -> None:
    busy, idle = await site.prefill(started=False), await site.prefill()
    decode = await site.decode(slots=2, credits_per_sequence=2)
    receiver = decode.worker.receiver
    queued = asyncio.create_task(receiver.fetch(fetch_of(busy, TOKENS)))
    await until(lambda: not busy.worker.idle)
    times = await receiver.fetch(fetch_of(idle, TOKENS, first_page=10))
    assert times.segments == 4
    assert not queued.done()
    busy.worker.engine.start()
    assert (await asyncio.wait_for(queued, LIMIT_S)).segments == 4
    planes = decode.planes()
    for plane in planes:
        assert plane[:7].any()
        assert plane[:6].equal(plane[10:16]), "the same prompt is the same KV, from either worker"
    assert receiver.slots_in_use == 0


async def events_of(prefill: Prefill, start: pb.StartPrefill, count: int) -> list[pb.PrefillEvent]:
    """The first events of a sequence whose reader grants no credit."""
    hello = pb.Hello(
        worker_id="reader",
        epoch="0" * 32,
        expected_epoch=prefill.address.epoch,
        compatibility=load().identity.compatibility_message(),
        slot_bytes=SLOT_BYTES,
    )
    async with open_channel(prefill.address.address) as channel:
        call = PrefillStub(channel).Session()
        for command in (pb.PrefillCommand(hello=hello), pb.PrefillCommand(start=start)):
            await call.write(command)
        events = [await asyncio.wait_for(next_message(call), LIMIT_S) for _ in range(count + 1)]
        call.cancel()
    return events[1:]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(8, ["computing", "first_tokens"]), (1, ["first_tokens", "done"])],
    ids=["KV follows", "no KV follows"],
)
async def test_credits_are_asked_for_when_kv_will_follow(
    site: Site, max_tokens: int, expected: list[str]
) -> None:
    prefill = await site.prefill()
    events = await events_of(prefill, start_of(20, max_tokens, sequence=1), 2)
    assert [event.WhichOneof("event") for event in events] == expected
    first = next(e.first_tokens for e in events if e.WhichOneof("event") == "first_tokens")
    assert first.prefill_s > 0
    assert first.queue_s > 0
