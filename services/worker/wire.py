"""Conversion between protobuf messages and the runtime's types, at the edge of a worker process."""

from headrace.v1 import error_pb2, request_pb2
from headrace.v1 import sampling_pb2 as pb
from runtime.core.request import FinishReason, Request, SampledToken, SamplingParams
from runtime.errors import InvalidRequest, NotFinite, RuntimeFault
from services.common.token_ids import unpack_tokens

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def request_from_message(key: str, message: request_pb2.Request) -> Request:
    """Return the engine's request with ``key`` as its id.

    Raises:
        InvalidRequest: the token ids are malformed.
    """
    try:
        tokens = unpack_tokens(message.tokens)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return Request(
        id=key,
        tokens=tokens,
        prompt_tokens=message.prompt_tokens,
        sampling=_sampling_from_message(message.sampling),
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        choices=message.choices,
    )


def _sampling_from_message(message: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def token_to_message(token: SampledToken) -> pb.Token:
    """Return the message of one sampled token."""
    return pb.Token(
        choice=token.choice,
        index=token.index,
        token=token.token,
        logprob=0.0 if token.logprob is None else token.logprob,
        top=[pb.TopLogprob(token=t, logprob=p) for t, p in token.top],
    )


def token_from_message(message: pb.Token, *, with_logprobs: bool) -> SampledToken:
    """Return the sampled token of a message; without logprobs ``logprob`` is None."""
    return SampledToken(
        choice=message.choice,
        index=message.index,
        token=message.token,
        logprob=message.logprob if with_logprobs else None,
        top=tuple((t.token, t.logprob) for t in message.top),
    )


def finish_to_message(reason: FinishReason) -> "pb.FinishReason.ValueType":
    """Return the message's enum value of a finish reason."""
    return _FINISH[reason]


def fault_to_code(fault: RuntimeFault) -> "error_pb2.ErrorCode.ValueType":
    """Return the error code of a refusal, by which the gateway decides whether to retry."""
    if isinstance(fault, InvalidRequest):
        return error_pb2.ERROR_CODE_INVALID
    if isinstance(fault, NotFinite):
        return error_pb2.ERROR_CODE_INTERNAL
    return error_pb2.ERROR_CODE_OVERLOADED
