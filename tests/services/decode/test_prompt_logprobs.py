"""Log probabilities of prompts on their way through the workers."""

from itertools import count

import pytest

from headrace.v1 import decode_pb2, error_pb2, sampling_pb2
from headrace.v1 import prefill_pb2 as pb
from services.common.prompt_scores import PromptScores
from services.worker import wire
from services.worker.streams import StreamSession
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

TOKENS = 70
TOP = 2
VOCAB = 211
_numbers = count(1)


def send(
    decode: Decode | Prefill, prefill: Prefill | None, max_tokens: int, *, scored: bool = True
) -> StreamSession:
    start = decode_pb2.StartStream(
        stream=next(_numbers), epoch=decode.worker.identity.epoch, deadline_s=LIMIT_S
    )
    start.request.CopyFrom(message_of(TOKENS, max_tokens))
    if scored:
        start.request.sampling.prompt_logprobs = TOP
    if prefill is not None:
        start.prefill.CopyFrom(prefill.address)
    return start_stream(decode.worker.service, start)


async def ask(
    decode: Decode | Prefill, prefill: Prefill | None, max_tokens: int, *, scored: bool = True
) -> decode_pb2.StreamDelta:
    session = send(decode, prefill, max_tokens, scored=scored)
    await until(lambda: not session.streams)
    output = output_of(session)
    assert not output.HasField("error"), output.error
    return output


def values_of(output: decode_pb2.StreamDelta) -> list[float]:
    """Check that the pieces are complete; return all values."""
    scores = PromptScores(TOKENS, TOP)
    for piece in output.prompt_logprobs:
        assert scores.take(piece, VOCAB) == piece
    assert scores.complete
    values = [value for piece in output.prompt_logprobs for value in piece.logprobs]
    return [*values, *(v for piece in output.prompt_logprobs for v in piece.top_logprobs)]


@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_prefill_worker_scores_and_decode_worker_relays(
    site: Site, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Cached pages of both workers are not used by the prefill."""
    monkeypatch.setattr(wire, "_PIECE_VALUES", 5 * (TOP + 1))
    prefill = await site.prefill(prefix_cache=True)
    decode = await site.decode(prefix_cache=True)
    plain = await ask(decode, prefill, max_tokens, scored=False)
    outputs = [await ask(decode, prefill, max_tokens) for _ in range(2)]
    first, again = map(values_of, outputs)
    assert first == pytest.approx(again, abs=1e-3)
    assert len(outputs[0].prompt_logprobs) >= TOKENS // 5
    assert [output.cached_tokens for output in outputs] == [0, 0]
    for output in outputs:
        assert [t.token for t in output.tokens] == [t.token for t in plain.tokens]
        assert len(output.tokens) == max_tokens
    await until(lambda: prefill.worker.idle and decode.worker.idle)


async def test_worker_that_computes_prompts_itself_scores_them(site: Site) -> None:
    decode, other = await site.decode(colocated=True), await site.prefill()
    own = values_of(await ask(decode, None, 4))
    fetched = values_of(await ask(await site.decode(), other, 4))
    assert own == pytest.approx(fetched, abs=1e-3)


async def test_malformed_values_of_a_prefill_worker_end_the_stream(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens arrive although a piece is missing."""
    prefill, decode = await site.prefill(), await site.decode()
    session_of = prefill.worker.prefills._new_session
    monkeypatch.setattr(session_of.func, "scored", lambda *_: None)
    session = send(decode, prefill, 4)
    await until(lambda: not session.streams)
    output = output_of(session)
    assert output.error.code != error_pb2.ERROR_CODE_UNSPECIFIED
    assert "log probabilities" in output.error.message
    assert not output.tokens


def test_messages_are_bounded() -> None:
    from runtime.core.request import PromptLogprobs

    count = 3000
    found = PromptLogprobs(
        1,
        20,
        (-0.5,) * count,
        (49151,) * count,
        (200_000,) * (20 * count),
        (-1.5,) * (20 * count),
    )
    scores = PromptScores(count + 1, 20)
    for piece in wire.prompt_logprobs_to_messages(found):
        assert scores.take(piece, 1 << 20) == piece
        assert pb.PromptScored(sequence=1 << 60, logprobs=piece).ByteSize() < 200_000
    assert scores.complete
    assert isinstance(piece, sampling_pb2.PromptLogprobs)
