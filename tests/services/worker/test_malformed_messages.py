"""Malformed messages of authenticated services fail their own requests, and nothing else."""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import aio

from headrace.v1 import decode_pb2, decode_pb2_grpc, error_pb2, request_pb2, sampling_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.errors import InvalidRequest
from services.common.grpc_server import GrpcServer, open_channel
from services.common.messages import MAX_DEADLINE_S
from services.gateway.settings import GatewaySettings
from services.transfer.fetch import FetchFailed
from services.worker.prefill_session import Job
from services.worker.stream_service import SERVICE
from services.worker.wire import request_from_message, token_from_message
from tests.runtime.tiny import CONFIG
from tests.services.workers import (
    LIMIT_S,
    Prefill,
    Site,
    fetch_of,
    message_of,
    open_stream,
    output_of,
    session_with,
    start_of,
    start_stream,
    until,
)

TOKENS = 40


@pytest.mark.parametrize("choices", [0, 1025, 2**32 - 1])
def test_number_of_choices_is_bounded_before_the_engine(choices: int) -> None:
    message = message_of(TOKENS)
    message.choices = choices
    with pytest.raises(InvalidRequest, match="choices must be between 1 and 1024"):
        request_from_message("r", message)


@pytest.mark.parametrize("placement_id", ["", "a b", "x" * 65, "id\n"])
def test_placement_id_that_no_heartbeat_could_report_is_refused(placement_id: str) -> None:
    message = message_of(TOKENS)
    message.placement_id = placement_id
    with pytest.raises(InvalidRequest, match="placement_id"):
        request_from_message("r", message)


@pytest.mark.parametrize(
    "token",
    [
        sampling_pb2.Token(token=7, index=1),
        sampling_pb2.Token(token=10, index=2),
        sampling_pb2.Token(token=7, index=2, logprob=math.nan),
        sampling_pb2.Token(token=7, index=2, top=[sampling_pb2.TopLogprob(token=10)]),
        sampling_pb2.Token(token=7, index=2, top=[sampling_pb2.TopLogprob(logprob=math.nan)]),
    ],
)
def test_malformed_token_is_refused(token: sampling_pb2.Token) -> None:
    good = sampling_pb2.Token(token=9, index=2, logprob=-1.0)
    convert = partial(token_from_message, index=2, vocab_size=10, with_logprobs=True)
    assert convert(good).token == 9
    with pytest.raises(InvalidRequest):
        convert(token)


async def _refused_stream(site: Site, start: decode_pb2.StartStream) -> error_pb2.Error:
    decode = await site.decode()
    start.epoch = decode.worker.identity.epoch
    output = output_of(start_stream(decode.worker.service, start))
    assert decode.worker.idle
    return output.error


async def test_deadline_of_a_stream_that_is_not_a_number_fails_the_stream(site: Site) -> None:
    prefill = await site.prefill()
    start = decode_pb2.StartStream(stream=1, prefill=prefill.address, deadline_s=math.nan)
    start.request.CopyFrom(message_of(TOKENS))
    error = await _refused_stream(site, start)
    assert (error.code, error.message) == (
        error_pb2.ERROR_CODE_INVALID,
        "deadline_s is not a number",
    )


async def test_malformed_token_ids_fail_only_their_stream(site: Site) -> None:
    start = decode_pb2.StartStream(stream=1, deadline_s=1)
    start.request.CopyFrom(message_of(20))
    start.request.tokens += b"\0"
    error = await _refused_stream(site, start)
    assert error.code == error_pb2.ERROR_CODE_INVALID
    assert "81 bytes are not a sequence of token ids" in error.message


def _bad_tokens(request: request_pb2.Request) -> None:
    request.tokens += b"\0"


def _bad_choices(request: request_pb2.Request) -> None:
    request.choices = 2**32 - 1


@pytest.mark.parametrize("spoil", [_bad_tokens, _bad_choices])
async def test_malformed_start_fails_only_its_sequence(
    site: Site, spoil: Callable[[request_pb2.Request], None]
) -> None:
    prefill = await site.prefill()
    bad, good = start_of(20, sequence=1), start_of(20, 1, sequence=2)
    spoil(bad.request)
    async with session_with(prefill) as session:
        await session.send(pb.PrefillCommand(start=bad), pb.PrefillCommand(start=good))
        failed = (await session.event()).failed
        assert (failed.sequence, failed.error.code) == (1, error_pb2.ERROR_CODE_INVALID)
        assert (await session.event()).first_tokens.sequence == 2


def _spoil_first_tokens(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pb.FirstTokens], None]
) -> None:
    original = pb.FirstTokens

    def spoiled(**fields: object) -> pb.FirstTokens:
        first = original(**fields)  # type: ignore[arg-type]
        spoil(first)
        return first

    monkeypatch.setattr("services.worker.prefill_session.pb.FirstTokens", spoiled)


async def test_first_token_outside_the_vocabulary_does_not_reach_the_engine(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await site.prefill(), await site.decode()

    def spoil(first: pb.FirstTokens) -> None:
        first.tokens[0].token = CONFIG.vocab_size

    with monkeypatch.context() as patch:
        _spoil_first_tokens(prefill, patch, spoil)
        bad = open_stream(decode, prefill, 1, TOKENS)
        await until(lambda: decode.worker.idle or decode.worker.fault.done())
    error = output_of(bad.session).error
    assert error.code == error_pb2.ERROR_CODE_INTEGRITY
    assert error.worker_id == prefill.address.worker_id
    good = open_stream(decode, prefill, 2, TOKENS)
    await until(lambda: decode.worker.idle or decode.worker.fault.done())
    assert len(output_of(good.session).tokens) == 8
    assert not decode.worker.fault.done()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
async def test_implausible_times_of_a_prefill_worker_fail_the_fetch(
    site: Site, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    prefill, decode = await site.prefill(), await site.decode()

    def spoil(first: pb.FirstTokens) -> None:
        first.queue_s = seconds

    _spoil_first_tokens(prefill, monkeypatch, spoil)
    with pytest.raises(FetchFailed, match="implausible times") as failed:
        await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
    assert failed.value.code == error_pb2.ERROR_CODE_INTEGRITY


async def test_deadline_of_a_prefill_that_is_not_a_number_fails_the_sequence(site: Site) -> None:
    prefill = await site.prefill()
    start = start_of(20, sequence=1)
    start.deadline_s = math.nan
    async with session_with(prefill) as session:
        await session.send(pb.PrefillCommand(start=start))
        failed = (await session.event()).failed
    assert failed.error.code == error_pb2.ERROR_CODE_INVALID


async def test_sequence_on_a_prefill_worker_ends_at_its_deadline(site: Site) -> None:
    """The engine is stopped, and the reader neither releases the sequence nor disconnects."""
    prefill = await site.prefill(started=False)
    start = start_of(20, sequence=1)
    start.deadline_s = 0.05
    async with session_with(prefill) as session:
        await session.send(pb.PrefillCommand(start=start))
        failed = (await session.event()).failed
        assert (failed.sequence, failed.error.code) == (1, error_pb2.ERROR_CODE_DEADLINE)
        assert prefill.worker.idle
        assert prefill.worker.sender.active == 0


def remaining_s(job: Job) -> float:
    """Return the seconds until a sequence ends at its deadline."""
    return job.expiry.when() - asyncio.get_running_loop().time()


async def test_decode_worker_passes_the_remaining_deadline_on(site: Site) -> None:
    prefill, decode = await site.prefill(started=False), await site.decode()
    open_stream(decode, prefill, 1, TOKENS)
    await until(lambda: bool(prefill.worker.jobs))
    (job,) = prefill.worker.jobs.values()
    assert 0 < remaining_s(job) <= LIMIT_S


@pytest.mark.parametrize("sent", [MAX_DEADLINE_S, math.inf])
async def test_longest_deadline_of_a_gateway_is_that_of_both_workers(
    site: Site, sent: float
) -> None:
    longest = GatewaySettings.model_validate({"deadline_s": MAX_DEADLINE_S}).deadline_s
    prefill, decode = await site.prefill(started=False), await site.decode()
    start = decode_pb2.StartStream(
        stream=1,
        epoch=decode.worker.identity.epoch,
        prefill=prefill.address,
        deadline_s=sent,
        request=message_of(TOKENS),
    )
    stream = start_stream(decode.worker.service, start).streams[1]
    await until(lambda: bool(prefill.worker.jobs))
    (job,) = prefill.worker.jobs.values()
    assert stream.deadline_s == longest
    assert longest - 2 * LIMIT_S < remaining_s(job) <= longest


async def test_address_with_another_workers_name_does_not_disturb_its_session(site: Site) -> None:
    """A gateway sent the address of one worker with the id of another one."""
    prefill, decode = await site.prefill(), await site.decode()
    receiver = decode.worker.receiver
    assert (await receiver.fetch(fetch_of(prefill, TOKENS))).segments == 2
    mixed = fetch_of(prefill, TOKENS)
    mixed.prefill = decode_pb2.WorkerAddress()
    mixed.prefill.CopyFrom(prefill.address)
    mixed.prefill.worker_id = "another"
    with pytest.raises(FetchFailed, match="not another") as failed:
        await receiver.fetch(mixed)
    assert failed.value.code == error_pb2.ERROR_CODE_INCOMPATIBLE
    assert (await receiver.fetch(fetch_of(prefill, TOKENS))).segments == 2


async def test_message_that_cannot_be_decoded_ends_its_session_with_invalid_argument(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = await site.prefill(started=False)
    caplog.clear()
    async with open_channel(prefill.address.address) as channel:
        call: Any = channel.stream_stream("/headrace.v1.Prefill/Session")()
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


async def test_session_that_is_aborted_while_an_answer_is_written_ends(site: Site) -> None:
    decode = await site.decode(started=False)
    server = GrpcServer("127.0.0.1:0", [SERVICE])
    decode_pb2_grpc.add_DecodeServicer_to_server(decode.worker.service, server.server)
    await server.start()
    refused = decode_pb2.StartStream(stream=1, request=message_of(TOKENS))
    refused.request.choices = 0
    async with open_channel(f"127.0.0.1:{server.port}") as channel, asyncio.timeout(LIMIT_S):
        for _ in range(100):
            call: Any = decode_pb2_grpc.DecodeStub(channel).Session()
            await call.write(decode_pb2.DecodeCommand(start=refused))
            await call.write(decode_pb2.DecodeCommand())  # without a command
            with suppress(aio.AioRpcError):
                while await call.read() is not aio.EOF:
                    pass
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(0)


async def test_number_of_a_cancelled_stream_can_be_used_again(site: Site) -> None:
    """The transfer of the cancelled stream has not ended when the second stream starts."""
    prefill, decode = await site.prefill(started=False), await site.decode()
    stream = open_stream(decode, prefill, 1, TOKENS)
    await until(lambda: prefill.worker.sender.active == 1)
    stream.session.end(stream)
    stream.session._start(stream.start)
    prefill.worker.engine.start()
    await until(lambda: decode.worker.idle)
    output = output_of(stream.session)
    assert not output.HasField("error"), output.error
    assert len(output.tokens) == 8
    engine = decode.worker.engine
    await until(lambda: engine.load.pages_free == engine.pages_total)


async def test_number_of_an_ended_sequence_cannot_be_used_again(site: Site) -> None:
    prefill = await site.prefill()
    async with session_with(prefill) as session:
        await session.send(pb.PrefillCommand(start=start_of(20, 1, sequence=5)))
        assert (await session.event()).first_tokens.sequence == 5
        release = pb.PrefillCommand(release=pb.ReleaseLease(sequence=5))
        starts = [pb.PrefillCommand(start=start_of(20, 1, number)) for number in (5, 4, 6)]
        await session.send(release, *starts)
        while not (event := await session.event()).HasField("first_tokens"):
            pass
        assert event.first_tokens.sequence == 6
