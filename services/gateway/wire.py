"""Conversion of a generation request to the message that starts a stream on a decode worker."""

from collections.abc import Mapping, Sequence

from headrace.v1 import decode_pb2, request_pb2, sampling_pb2
from services.common.constraints import constraint_message
from services.common.placement import Placement
from services.common.token_ids import pack_tokens
from services.gateway.requests import GenerationRequest

# Names of the fields with the same values in `Sampling` and `GenerationOptions`.
_SAMPLING_FIELDS = tuple(
    field.name
    for field in sampling_pb2.Sampling.DESCRIPTOR.fields
    if field.name not in ("seed", "bad_words", "prompt_logprobs")
)


def start_stream_message(
    request: GenerationRequest,
    placement: Placement,
    *,
    attempt: int,
    max_tokens: int,
    replayed: Sequence[int],
    stop_token_ids: Sequence[int],
    deadline_s: float,
    trace: Mapping[str, str] | None = None,
    prompt_logprobs: int | None = None,
) -> decode_pb2.StartStream:
    """Return the message that starts one attempt; the session sets its stream number.

    Args:
        max_tokens: maximum output tokens of each choice, those of earlier attempts included.
        replayed: output tokens that earlier attempts delivered to the client.
        stop_token_ids: tokens that end a choice.
        deadline_s: seconds from the receipt of the message.
        trace: headers of the span whose child the worker's span will be; empty without tracing.
        prompt_logprobs: number of most likely tokens to report beside each prompt token; None for
            no log probabilities of the prompt.
    """
    options, grammar = request.options, request.grammar
    sampling = {name: getattr(options, name) for name in _SAMPLING_FIELDS}
    prefill = placement.prefill
    return decode_pb2.StartStream(
        epoch=placement.decode.epoch,
        prefill=decode_pb2.WorkerAddress(**prefill.model_dump()) if prefill else None,
        deadline_s=deadline_s,
        trace=request_pb2.TraceContext(**trace) if trace else None,
        request=request_pb2.Request(
            request_id=request.context.request_id,
            attempt=attempt,
            placement_id=placement.placement_id,
            tokens=request.packed + pack_tokens(replayed),
            prompt_tokens=request.prompt_tokens,
            sampling=sampling_pb2.Sampling(
                **sampling,
                seed=request.seed,
                prompt_logprobs=prompt_logprobs,
                bad_words=[sampling_pb2.BadWord(tokens=word) for word in request.bad_words],
            ),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            choices=options.n,
            cache_salt=request.cache_salt,
            structured_outputs=constraint_message(grammar) if grammar else None,
            output_frame=grammar.frame if grammar else "",
        ),
    )
