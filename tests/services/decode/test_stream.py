"""A first token from a prefill worker may also be its choice's last one."""

from typing import cast

import pytest

from headrace.v1 import decode_pb2
from runtime.core.request import FinishReason, Request, SampledToken, SamplingParams
from services.worker.streams import Stream, StreamSession


@pytest.mark.parametrize(
    ("token", "max_tokens", "context_length", "reason"),
    [
        (7, 5, 100, FinishReason.STOP),
        (8, 1, 100, FinishReason.LENGTH),
        (8, 5, 4, FinishReason.LENGTH),  # three prompt tokens and this one fill the context
        (8, 5, 5, None),
    ],
)
def test_first_token_ends_its_choice_at_a_stop_token_or_limit(
    token: int, max_tokens: int, context_length: int, reason: FinishReason | None
) -> None:
    request = Request("r", (1, 2, 3), 3, SamplingParams(), max_tokens, frozenset({7}))
    session = cast(StreamSession, None)
    stream = Stream(1, "r", session, decode_pb2.StartStream(), request, {0})
    first = SampledToken(0, 0, token, None, ())
    assert stream.ends_with(first, context_length) is reason
