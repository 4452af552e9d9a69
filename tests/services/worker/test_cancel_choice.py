"""A gateway cancels one choice of a stream, whose other choices continue."""

import pytest

from headrace.v1 import decode_pb2
from services.worker.streams import StreamSession
from tests.services.workers import (
    LIMIT_S,
    Site,
    message_of,
    output_of,
    start_stream,
    until,
)

TOKENS, MAX_TOKENS = 40, 60


def tokens_of(session: StreamSession, choice: int) -> list[int]:
    return [token.token for token in output_of(session).tokens if token.choice == choice]


def cancel(session: StreamSession, choice: int) -> None:
    session.cancel_choice(decode_pb2.CancelChoice(stream=1, choice=choice))


@pytest.mark.parametrize("fetched", [True, False])
async def test_cancelled_choice_stops_decoding_and_frees_its_batch_slot(
    site: Site, fetched: bool
) -> None:
    prefill, decode = await site.prefill(), await site.decode(colocated=True)
    engine, service = decode.worker.engine, decode.worker.service
    start = decode_pb2.StartStream(
        stream=1,
        epoch=decode.worker.identity.epoch,
        prefill=prefill.address if fetched else None,
        deadline_s=LIMIT_S,
        request=message_of(TOKENS, MAX_TOKENS),
    )
    start.request.choices = 3
    session = start_stream(service, start)
    await until(lambda: bool(tokens_of(session, 1)))
    cancel(session, 1)
    cancel(session, 1)
    cancel(session, 7)
    await until(lambda: decode.worker.idle)
    ended = [end.choice for end in output_of(session).ended]
    assert sorted(ended) == [0, 2]
    assert output_of(session).HasField("stages")
    assert len(tokens_of(session, 0)) == len(tokens_of(session, 2)) == MAX_TOKENS
    assert len(tokens_of(session, 1)) < MAX_TOKENS
    assert tokens_of(session, 0)[: len(tokens_of(session, 1))] == tokens_of(session, 1)
    await until(lambda: engine.load.pages_free == engine.pages_total)


async def test_stream_whose_choices_were_all_cancelled_ends(site: Site) -> None:
    decode = await site.decode(colocated=True)
    engine = decode.worker.engine
    start = decode_pb2.StartStream(
        stream=1,
        epoch=decode.worker.identity.epoch,
        deadline_s=LIMIT_S,
        request=message_of(TOKENS, MAX_TOKENS),
    )
    start.request.choices = 2
    session = start_stream(decode.worker.service, start)
    await until(lambda: bool(tokens_of(session, 1)))
    cancel(session, 0)
    cancel(session, 1)
    assert decode.worker.idle
    assert not output_of(session).ended
    await until(lambda: engine.load.pages_free == engine.pages_total)
