"""Event times of the synthetic server, according to its log.

Upper bounds on lateness use the minimum over many events, because the machine may be busy.
"""

import asyncio
import heapq
import itertools
import time

import httpx
import pytest

from headrace.v1 import inference_pb2 as pb
from tests.loadgen.synthetic import Behaviour, SyntheticServer, serving
from tests.loadgen.synthetic_client import (
    EARLY_S,
    NO_ANSWER_S,
    exchange,
    exchange_async,
    generate,
    lateness,
)

LATE_S = 0.1


def test_events_are_written_when_they_are_due() -> None:
    behaviour = Behaviour(ttft_s=0.03, itl_s=0.01)
    with serving(behaviour) as server:
        for _ in range(5):
            exchange(server.url, max_tokens=20, stream=True)
        truths = server.log()
    assert [truth.number for truth in truths] == [0, 1, 2, 3, 4]
    late = lateness(truths, behaviour)
    assert len(late) == 100
    assert min(late) > -EARLY_S
    assert min(late[0::20]) < LATE_S
    # if lateness accumulated, the last events would be late
    assert min(late[19::20]) < LATE_S
    for truth in truths:
        assert truth.started == truth.read
        assert truth.ended
        assert truth.ended >= truth.written[-1]


def test_client_receives_each_event_separately_after_it_was_written() -> None:
    with serving(Behaviour(ttft_s=0.05, itl_s=0.05)) as server:
        body = {"prompt": "x", "max_tokens": 5, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as answer:
            seen = [time.monotonic() for line in answer.iter_lines() if '"text"' in line]
        (truth,) = server.log()
    waits = [at - written for at, written in zip(seen, truth.written, strict=True)]
    assert min(waits) >= 0
    assert min(waits) < LATE_S


def test_queue_is_first_come_first_served() -> None:
    """There are two slots, and each request holds one for 0.3 s."""
    behaviour = Behaviour(ttft_s=0.2, itl_s=0.05, concurrency=2)

    async def send_all(server: SyntheticServer) -> None:
        await asyncio.gather(*(exchange_async(server, max_tokens=3, stream=True) for _ in range(5)))

    with serving(behaviour) as server:
        asyncio.run(send_all(server))
        truths = server.log()
    free = [0.0, 0.0]
    for truth in truths:
        started = max(truth.read, heapq.heappop(free))
        # Slots that are free within the same millisecond may be taken in either order.
        assert truth.started == pytest.approx(started, abs=1e-3)
        heapq.heappush(free, started + 0.3)
    assert min(lateness(truths, behaviour)) > -EARLY_S


def test_stall_holds_back_events_and_requests() -> None:
    behaviour = Behaviour(itl_s=0.04, stall_s=(0.1, 0.5))

    async def send_both(server: SyntheticServer) -> None:
        first = asyncio.create_task(exchange_async(server, max_tokens=16, stream=True))
        await asyncio.sleep(0.3)
        await exchange_async(server, max_tokens=1, stream=True)
        await first

    with serving(behaviour) as server:
        asyncio.run(send_both(server))
        first, second = server.log()
    offsets = [at - first.read for at in first.written]
    assert len(offsets) == 16
    assert not [at for at in offsets if 0.1 <= at < 0.5 - EARLY_S]
    # events due at 0.12, ..., 0.48 are written together, later ones at their own times
    gaps = [after - before for before, after in itertools.pairwise(offsets[3:13])]
    assert min(gaps) < 0.01
    assert offsets[13] > 0.52 - EARLY_S
    assert offsets[15] > 0.6 - EARLY_S
    assert second.read - first.read >= 0.5 - EARLY_S


async def test_grpc_keeps_the_same_times() -> None:
    behaviour = Behaviour(ttft_s=0.03, itl_s=0.01, tokens_per_event=3)
    with serving(behaviour) as server:
        for id in "abc":
            answer = generate(server, request_id=id, text="one two", max_tokens=20)
            responses = [response async for response in answer]
        truths = server.log()
    assert [truth.id for truth in truths] == ["a", "b", "c"]
    chunks = [r for r in responses if isinstance(r, pb.GenerateResponse)]
    assert [token.token for chunk in chunks for token in chunk.tokens] == list(range(20))
    assert [len(chunk.tokens) for chunk in chunks] == [3] * 6 + [2]
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 20)
    late = lateness(truths, behaviour)
    assert len(late) == 21
    assert min(late) > -EARLY_S
    assert min(late) < LATE_S


def test_many_concurrent_requests() -> None:
    behaviour = Behaviour(ttft_s=0.1, itl_s=0.03)

    async def send_all(server: SyntheticServer) -> list[bytes]:
        requests = (exchange_async(server, max_tokens=32, stream=True) for _ in range(150))
        return await asyncio.gather(*requests)

    with serving(behaviour) as server:
        answers = asyncio.run(send_all(server))
        truths = server.log()
    assert {answer.count(b'"text":" w') for answer in answers} == {32}
    late = lateness(truths, behaviour)
    assert len(late) == 150 * 32
    assert min(late) > -EARLY_S


def test_disconnected_client_frees_its_slot() -> None:
    with serving(Behaviour(ttft_s=60.0, concurrency=1)) as server:
        for _ in range(2):
            assert exchange(server.url, wait_s=NO_ANSWER_S, max_tokens=1, stream=True)[1] == "open"
        until = time.monotonic() + 30
        while not (truths := server.log())[-1].left and time.monotonic() < until:
            time.sleep(0.01)
    assert truths[1].started
    assert truths[1].left
