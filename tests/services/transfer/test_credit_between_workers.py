"""Landing slots go to prompts that are being computed, not to queued ones."""

import asyncio

import pytest

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from tests.runtime.tiny import CONFIG
from tests.services.workers import (
    LIMIT_S,
    Site,
    fetch_of,
    session_with,
    start_of,
    until,
)

TOKENS = 100  # four segments, through two landing slots


async def test_queued_prompt_holds_no_landing_slot(site: Site) -> None:
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
        assert plane[:6].equal(plane[10:16]), "both workers compute the same KV of a prompt"
    assert (receiver.landing[0].held, receiver.landing[0].quarantined) == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "expected"),
    [
        (20, 8, ["computing", "first_tokens"]),
        (20, 1, ["first_tokens", "done"]),
        (CONFIG.context_length - 1, 8, ["first_tokens", "done"]),
    ],
    ids=["KV follows", "no KV follows", "context is full"],
)
async def test_computing_is_sent_only_if_kv_will_follow(
    site: Site, tokens: int, max_tokens: int, expected: list[str]
) -> None:
    prefill = await site.prefill()
    async with session_with(prefill) as session:
        await session.send(pb.PrefillCommand(start=start_of(tokens, max_tokens, sequence=1)))
        events = [await session.event() for _ in range(2)]
    assert [event.WhichOneof("event") for event in events] == expected
    first = next(e.first_tokens for e in events if e.WhichOneof("event") == "first_tokens")
    assert first.prefill_s > 0
    assert first.queue_s > 0


async def test_lease_runs_only_while_segments_are_unacknowledged(site: Site) -> None:
    """The reader waits for landing slots, then stops to acknowledge."""
    prefill = await site.prefill(lease_s=0.05)
    async with session_with(prefill) as session:
        await session.send(pb.PrefillCommand(start=start_of(20, sequence=1)))
        while (await session.event()).WhichOneof("event") != "first_tokens":
            pass
        await asyncio.sleep(0.2)
        prefill.worker.observe()
        assert prefill.metric("headrace_kv_lease_active") == 1
        assert prefill.metric("headrace_kv_lease_expired_total") == 0
        await session.send(pb.PrefillCommand(credit=pb.Credit(sequence=1, segments=1)))
        while (await session.event()).WhichOneof("event") != "ready":
            pass
        await asyncio.sleep(0.2)
        prefill.worker.observe()
        while (event := await session.event()).WhichOneof("event") != "failed":
            pass
        assert event.failed.error.code == error_pb2.ERROR_CODE_LEASE_EXPIRED
    assert prefill.worker.sender.slots_in_use == 0


async def test_worker_info_names_model_kv_format_and_kernels(site: Site) -> None:
    prefill = await site.prefill()
    labels = {
        "worker": prefill.loaded.identity.worker_id,
        "model": prefill.loaded.identity.model.name,
        "kv_format": "dense",
        "matmul": "packed",
        "attention": prefill.loaded.rank.executor.model.kv_format.kernels,
        "kernel_plan": prefill.loaded.identity.compatibility.kernel_plan_hash,
    }
    value = prefill.worker.metrics.registry.get_sample_value
    assert value("headrace_worker_info", labels) == 1


async def test_stopped_reader_does_not_block_another_reader(site: Site) -> None:
    """The stopped reader has granted credits and sends no acknowledgement."""
    prefill, decode = await site.prefill(slots=4), await site.decode()
    async with session_with(prefill) as stopped:
        await stopped.send(pb.PrefillCommand(start=start_of(150, sequence=1)))
        await stopped.send(pb.PrefillCommand(credit=pb.Credit(sequence=1, segments=100)))
        while (await stopped.event()).WhichOneof("event") != "first_tokens":
            pass
        await until(lambda: prefill.worker.sender.slots_in_use == 3)
        times = await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
        assert times.segments == 4
        await until(
            lambda: prefill.worker.sender.slots_in_use == 3
        )  # its acknowledgements have arrived
        prefill.worker.observe()
        assert prefill.metric("headrace_kv_slab_slots_in_use") == 3
    await until(lambda: prefill.worker.sender.slots_in_use == 0)
    prefill.worker.observe()
    assert prefill.metric("headrace_kv_slab_slots_in_use") == 0
