"""KV of compressed formats between workers: stored pages, exact pages, and nothing else."""

from collections.abc import Sequence

import pytest

from headrace.v1 import decode_pb2, sampling_pb2
from runtime.kv.registry import COMPRESSED
from services.common.token_ids import pack_tokens
from services.worker.stream_service import StreamService
from services.worker.streams import StreamSession
from tests.runtime.tiny import prompt_of
from tests.services.workers import (
    LIMIT_S,
    Decode,
    Prefill,
    Site,
    message_of,
    output_of,
    start_stream,
    until,
)

SAMPLING = sampling_pb2.Sampling(temperature=0.9, top_p=1.0, repetition_penalty=1.0, seed=11)
ANSWER = 40


def start(
    service: StreamService,
    worker: Prefill | Decode,
    tokens: int,
    prefill: Prefill | None,
    *,
    choices: int = 1,
    delivered: Sequence[int] = (),
    answer: int = ANSWER,
) -> StreamSession:
    """Start a stream; without ``prefill``, the worker computes the prompt itself."""
    start = decode_pb2.StartStream(
        stream=tokens, epoch=worker.worker.identity.epoch, deadline_s=LIMIT_S
    )
    start.request.CopyFrom(message_of(tokens, answer))
    start.request.sampling.CopyFrom(SAMPLING)
    start.request.choices = choices
    start.request.tokens = pack_tokens((*prompt_of(tokens), *delivered))
    if prefill is not None:
        start.prefill.CopyFrom(prefill.address)
    return start_stream(service, start)


def tokens_of(session: StreamSession, choice: int = 0) -> list[int]:
    return [token.token for token in output_of(session).tokens if token.choice == choice]


def idle(*workers: Prefill | Decode) -> bool:
    loads = [worker.worker.engine for worker in workers]
    free = all(
        (engine.load.pages_free, engine.load.stored_free)
        == (engine.pages_total, engine.stored_total)
        for engine in loads
    )
    return free and all(worker.worker.idle for worker in workers)


@pytest.mark.parametrize("name", COMPRESSED)
async def test_tokens_equal_those_of_one_worker(site: Site, name: str) -> None:
    prefill, decode = await site.prefill(kv_format=name), await site.decode(kv_format=name)
    lengths = (5, 16, 79, 80, 100, 300)
    local = [start(prefill.worker.service, prefill, length, None) for length in lengths]
    await until(lambda: idle(prefill))
    remote = [start(decode.worker.service, decode, length, prefill) for length in lengths]
    await until(lambda: idle(prefill, decode))
    assert [tokens_of(one) for one in remote] == [tokens_of(one) for one in local]
    assert all(len(tokens_of(one)) == ANSWER for one in local)
    assert not prefill.worker.sender.active


async def test_choices_share_the_stored_pages_of_their_prompt(site: Site) -> None:
    prefill, decode = await site.prefill(kv_format="int4"), await site.decode(kv_format="int4")
    local = start(prefill.worker.service, prefill, 150, None, choices=3)
    await until(lambda: idle(prefill))
    remote = start(decode.worker.service, decode, 150, prefill, choices=3)
    await until(lambda: idle(prefill, decode))
    for choice in range(3):
        assert tokens_of(remote, choice) == tokens_of(local, choice)
        assert len(tokens_of(local, choice)) == ANSWER


@pytest.mark.parametrize("delivered", [1, 30, ANSWER - 1])
async def test_replayed_sequence_continues_exactly(site: Site, delivered: int) -> None:
    """Its delivered tokens attended stored pages, so decode steps compute them again."""
    prefill, decode = await site.prefill(kv_format="k4v2"), await site.decode(kv_format="k4v2")
    whole = start(decode.worker.service, decode, 120, prefill)
    await until(lambda: idle(prefill, decode))
    tokens = tokens_of(whole)
    rest = start(decode.worker.service, decode, 120, prefill, delivered=tokens[:delivered])
    await until(lambda: idle(prefill, decode))
    assert tokens_of(rest) == tokens[delivered:]
    assert [token.index for token in output_of(rest).tokens] == list(range(delivered, ANSWER))
