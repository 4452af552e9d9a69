"""Conversion between protobuf messages and the runtime's types, at the edge of a worker process.

Values that the engine or the event loop could not handle are refused here.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from headrace.v1 import decode_pb2, error_pb2, prefill_pb2, request_pb2
from headrace.v1 import sampling_pb2 as pb
from runtime.core.request import (
    FinishReason,
    PromptLogprobs,
    Request,
    SampledToken,
    SamplingParams,
)
from runtime.errors import GrammarFailed, InvalidRequest, NotCached, NotFinite, RuntimeFault
from runtime.grammar.spec import GrammarSpec
from services.common.constraints import constraint_of
from services.common.messages import (
    MAX_CHOICES,
    MAX_DEADLINE_S,
    MAX_SALT_BYTES,
    PLACEMENT_ID,
)
from services.common.token_ids import unpack_tokens
from services.common.tracing import MAX_TEXT_CHARS, Attributes, Span, message_headers, resume

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
"""Finish reasons of messages."""
_PIECE_VALUES = 1 << 14
"""Maximum number of log probabilities in a message: about 160 KiB."""


def request_from_message(key: str, message: request_pb2.Request) -> Request:
    """Return the engine's request with ``key`` as its id, without its grammar.

    If the message has a constraint, ``sampling.constrained`` is true, and the grammar must be added
    before the engine gets the request; see `constraint_from_message`.

    Raises:
        InvalidRequest: the token ids or the placement's id are malformed, or the number of choices
            or the size of the salt is out of bounds.
    """
    if not 1 <= message.choices <= MAX_CHOICES:
        raise InvalidRequest(f"choices must be between 1 and {MAX_CHOICES}, not {message.choices}")
    if not re.fullmatch(PLACEMENT_ID, message.placement_id):
        raise InvalidRequest(f"placement_id {message.placement_id[:80]!r} is malformed")
    if len(message.cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has more than {MAX_SALT_BYTES} bytes")
    try:
        tokens = unpack_tokens(message.tokens)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return Request(
        id=key,
        tokens=tokens,
        prompt_tokens=message.prompt_tokens,
        sampling=_sampling_from_message(message),
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        choices=message.choices,
        salt=message.cache_salt,
    )


def request_span(name: str, message: decode_pb2.StartStream | prefill_pb2.StartPrefill) -> Span:
    """Start the span of a request on this worker, below the span that the message names."""
    request = message.request
    attributes: Attributes = {
        "headrace.request.id": request.request_id[:MAX_TEXT_CHARS],
        "headrace.attempt": request.attempt,
        "headrace.prompt_tokens": request.prompt_tokens,
    }
    return resume(name, message_headers(message.trace), attributes)


def _sampling_from_message(request: request_pb2.Request) -> SamplingParams:
    """Return the sampling parameters; each field of the message has the name of a parameter."""
    message = request.sampling
    present = {field.name for field, _ in message.ListFields()}
    values: dict[str, Any] = {}
    for field in pb.Sampling.DESCRIPTOR.fields:
        if field.name in present or not field.has_presence:
            value = getattr(message, field.name)
            values[field.name] = dict(value) if isinstance(value, Mapping) else value
    values["allowed_token_ids"] = frozenset(message.allowed_token_ids)
    values["bad_words"] = tuple(tuple(word.tokens) for word in message.bad_words)
    return SamplingParams(
        **values,
        suppressed=frozenset(request.stop_token_ids if message.min_tokens else ()),
        constrained=constraint_from_message(request) is not None,
    )


def constraint_from_message(request: request_pb2.Request) -> GrammarSpec | None:
    """Return the constraint on the output, or None."""
    if not request.HasField("structured_outputs"):
        return None
    spec = constraint_of(request.structured_outputs)
    return replace(spec, frame=request.output_frame) if spec else None


def token_to_message(token: SampledToken) -> pb.Token:
    """Return the message of one sampled token."""
    return pb.Token(
        choice=token.choice,
        index=token.index,
        token=token.token,
        logprob=0.0 if token.logprob is None else token.logprob,
        top=[pb.TopLogprob(token=t, logprob=p) for t, p in token.top],
    )


def prompt_logprobs_to_messages(found: PromptLogprobs) -> Iterator[pb.PromptLogprobs]:
    """Yield messages of bounded size for log probabilities of prompt tokens."""
    top = found.top
    step = max(1, _PIECE_VALUES // (top + 1))
    for start in range(0, len(found.logprobs), step):
        end = start + step
        yield pb.PromptLogprobs(
            first=found.first + start,
            logprobs=found.logprobs[start:end],
            ranks=found.ranks[start:end],
            top_tokens=found.top_tokens[start * top : end * top],
            top_logprobs=found.top_logprobs[start * top : end * top],
        )


def deadline_from_message(deadline_s: float) -> float:
    """Return the deadline of a message, in seconds; one that has passed may be negative.

    Gateways set it. `MAX_DEADLINE_S`, which is the upper limit of their setting, bounds it here.

    Raises:
        InvalidRequest: it is not a number.
    """
    if math.isnan(deadline_s):
        raise InvalidRequest("deadline_s is not a number")
    return min(deadline_s, MAX_DEADLINE_S)


def token_from_message(
    message: pb.Token, *, index: int, vocab_size: int, with_logprobs: bool
) -> SampledToken:
    """Return the sampled token of a message; without logprobs ``logprob`` is None.

    Args:
        index: the expected output index.

    Raises:
        InvalidRequest: the output index differs, or a token or log probability is out of bounds.
    """
    if message.index != index:
        raise InvalidRequest(f"output index {message.index}, expected {index}")
    for token, logprob in (
        (message.token, message.logprob),
        *((top.token, top.logprob) for top in message.top),
    ):
        if token >= vocab_size:
            raise InvalidRequest(f"token {token} is outside the vocabulary of {vocab_size}")
        if not math.isfinite(logprob):
            raise InvalidRequest(f"the log probability of token {token} is {logprob}")
    return SampledToken(
        choice=message.choice,
        index=message.index,
        token=message.token,
        logprob=message.logprob if with_logprobs else None,
        top=tuple((t.token, t.logprob) for t in message.top),
    )


def fault_to_code(fault: RuntimeFault) -> "error_pb2.ErrorCode.ValueType":
    """Return the error code of a refusal, by which the gateway decides whether to retry."""
    if isinstance(fault, InvalidRequest | GrammarFailed):
        return error_pb2.ERROR_CODE_INVALID
    if isinstance(fault, NotFinite):
        return error_pb2.ERROR_CODE_NOT_FINITE
    if isinstance(fault, NotCached):
        return error_pb2.ERROR_CODE_NOT_CACHED
    return error_pb2.ERROR_CODE_OVERLOADED
