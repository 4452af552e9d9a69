"""A prefill worker that decodes serves whole requests beside prompts for decode workers."""

from headrace.v1 import decode_pb2, error_pb2
from tests.services.workers import (
    LIMIT_S,
    Prefill,
    Site,
    message_of,
    open_stream,
    output_of,
    start_stream,
    until,
)

TOKENS = 40


def start_of(prefill: Prefill, number: int, max_tokens: int = 8) -> decode_pb2.StartStream:
    """Return the start of a stream without a prefill worker."""
    return decode_pb2.StartStream(
        stream=number,
        epoch=prefill.worker.identity.epoch,
        deadline_s=LIMIT_S,
        request=message_of(TOKENS, max_tokens),
    )


async def test_whole_requests_get_the_tokens_of_disaggregated_ones(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    remote = [open_stream(decode, prefill, number, TOKENS).session for number in range(3)]
    local = [start_stream(prefill.worker.service, start_of(prefill, n)) for n in range(3, 6)]
    await until(lambda: prefill.worker.idle and decode.worker.idle)
    expected, *others = [[t.token for t in output_of(session).tokens] for session in remote + local]
    assert len(expected) == 8
    assert others == [expected] * 5
    await until(lambda: prefill.worker.engine.load.pages_free == prefill.worker.engine.pages_total)
    assert not prefill.worker.sender.active


async def test_stop_tokens_are_not_sampled_before_min_tokens(site: Site) -> None:
    """One worker, or a prefill worker that samples the first token and a decode worker."""
    prefill, decode = await site.prefill(), await site.decode()
    start = start_of(prefill, 1)
    start.request.sampling.min_tokens = 5
    start.request.stop_token_ids.extend(range(180))
    remote = decode_pb2.StartStream()
    remote.CopyFrom(start)
    remote.epoch = decode.worker.identity.epoch
    remote.prefill.CopyFrom(prefill.address)
    sessions = [
        start_stream(prefill.worker.service, start),
        start_stream(decode.worker.service, remote),
    ]
    await until(lambda: prefill.worker.idle and decode.worker.idle)
    local, fetched = ([t.token for t in output_of(session).tokens] for session in sessions)
    assert local == fetched
    assert all(token >= 180 for token in local[:5])
    assert len(local) == 6
    assert local[5] < 180


async def test_cancelled_whole_request_frees_its_pages(site: Site) -> None:
    prefill = await site.prefill()
    engine = prefill.worker.engine
    session = start_stream(prefill.worker.service, start_of(prefill, 1, max_tokens=80))
    await until(lambda: bool(output_of(session).tokens))
    assert not prefill.worker.idle
    session.end(session.streams[1])
    assert prefill.worker.idle
    await until(lambda: engine.load.pages_free == engine.pages_total)


async def test_draining_prefill_worker_refuses_whole_requests(site: Site) -> None:
    prefill = await site.prefill()
    prefill.worker.draining = True
    session = start_stream(prefill.worker.service, start_of(prefill, 1))
    assert output_of(session).error.code == error_pb2.ERROR_CODE_DRAINING


async def test_stream_with_a_prefill_worker_is_refused(site: Site) -> None:
    prefill, other = await site.prefill(), await site.prefill()
    start = start_of(prefill, 1)
    start.prefill.CopyFrom(other.address)
    session = start_stream(prefill.worker.service, start)
    assert output_of(session).error.code == error_pb2.ERROR_CODE_INVALID
    assert "computes prompts itself" in output_of(session).error.message
