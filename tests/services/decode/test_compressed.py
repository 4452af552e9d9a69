"""A colocated worker with a compressed KV format serves requests."""

import pytest

from headrace.v1 import decode_pb2, error_pb2
from tests.services.workers import (
    LIMIT_S,
    Decode,
    Site,
    message_of,
    output_of,
    start_stream,
    until,
)

TOKENS = 120


def start_of(decode: Decode, number: int, max_tokens: int = 40) -> decode_pb2.StartStream:
    """Return the start of a stream without a prefill worker."""
    return decode_pb2.StartStream(
        stream=number,
        epoch=decode.worker.identity.epoch,
        deadline_s=LIMIT_S,
        request=message_of(TOKENS, max_tokens),
    )


@pytest.mark.long
async def test_colocated_worker_answers_and_its_pages_return(site: Site) -> None:
    worker = (decode := await site.decode(colocated=True, kv_format="int4")).worker
    sessions = [start_stream(worker.service, start_of(decode, number)) for number in range(3)]
    await until(lambda: worker.idle)
    answers = [[token.token for token in output_of(session).tokens] for session in sessions]
    assert len(answers[0]) == 40
    assert answers == answers[:1] * 3
    await until(lambda: worker.engine.load.pages_free == worker.engine.pages_total)


async def test_cancelled_stream_returns_its_pages(site: Site) -> None:
    worker = (decode := await site.decode(colocated=True, kv_format="int4")).worker
    session = start_stream(worker.service, start_of(decode, 1, max_tokens=200))
    await until(lambda: bool(output_of(session).tokens))
    session.end(session.streams[1])
    await until(lambda: worker.engine.load.pages_free == worker.engine.pages_total)


async def test_prefill_worker_with_another_format_is_refused(site: Site) -> None:
    decode, prefill = await site.decode(colocated=True, kv_format="int4"), await site.prefill()
    start = start_of(decode, 1)
    start.prefill.CopyFrom(prefill.address)
    session = start_stream(decode.worker.service, start)
    await until(lambda: output_of(session).HasField("error"))
    assert output_of(session).error.code == error_pb2.ERROR_CODE_INCOMPATIBLE
