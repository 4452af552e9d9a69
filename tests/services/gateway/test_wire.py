"""Conversion of requests to and from protobuf, by field name."""

from headrace.v1 import inference_pb2, sampling_pb2
from services.common.messages import MAX_TOKENS
from services.common.placement import ModelInfo, Placement, WorkerAddress
from services.common.token_ids import pack_tokens, unpack_tokens
from services.gateway.requests import GenerationOptions, GenerationRequest, RequestContext
from services.gateway.wire import start_stream_message
from tests.services.gateway.fakes import MODEL

MODEL_INFO = ModelInfo.model_validate(MODEL | {"name": "m"})
NOT_OPTIONS = {"model", "text", "tokens", "chat", "user", "request_id", "add_special_tokens"}
NOT_SAMPLING = {
    "echo",
    *("max_tokens", "n", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("priority", "cache_salt", "truncate_prompt_tokens", "truncation_side", "constraint"),
}
"""Options that workers do not need, or that other fields of the message carry."""


def test_generation_options_and_sampling_message_have_the_same_fields() -> None:
    names = {field.name for field in sampling_pb2.Sampling.DESCRIPTOR.fields}
    assert names == GenerationOptions.model_fields.keys() - NOT_SAMPLING


def test_grpc_message_and_options_have_the_same_fields() -> None:
    names = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    options = GenerationOptions.model_fields.keys() - {"constraint"} | {"structured_outputs"}
    assert names - NOT_OPTIONS == options


def test_start_message_has_all_fields_of_the_request() -> None:
    options = GenerationOptions(
        n=1, temperature=0.5, top_k=-1, seed=-1, logit_bias={7: -2.0}, logprobs=3, max_tokens=9
    )
    assert options.seed is not None
    context = RequestContext("request", None, 0.0, 1.0)
    request = GenerationRequest(context, pack_tokens((1, 2, 3)), 9, options.seed, options)
    prefill = WorkerAddress(worker_id="p", epoch="e1", address="h:1")
    decode = WorkerAddress(worker_id="d", epoch="e2", address="h:2")
    message = start_stream_message(
        request,
        Placement(placement_id="x", prefill=prefill, decode=decode, max_tokens=7, model=MODEL_INFO),
        attempt=2,
        max_tokens=9,
        replayed=[4, 5],
        stop_token_ids=[0],
        deadline_s=0.5,
    )
    sent = message.request
    assert unpack_tokens(sent.tokens) == (1, 2, 3, 4, 5)
    assert (sent.prompt_tokens, sent.max_tokens, sent.choices) == (3, 9, 1)
    assert (sent.request_id, sent.attempt, message.epoch) == ("request", 2, "e2")
    assert (message.prefill.worker_id, message.prefill.address) == ("p", "h:1")
    assert sent.sampling == sampling_pb2.Sampling(
        temperature=0.5,
        top_p=1.0,
        top_k=0,
        seed=(1 << 64) - 1,
        repetition_penalty=1.0,
        logit_bias={7: -2.0},
        logprobs=3,
    )
    colocated = Placement(
        placement_id="x", prefill=None, decode=decode, max_tokens=9, model=MODEL_INFO
    )
    message = start_stream_message(
        request, colocated, attempt=0, max_tokens=9, replayed=(), stop_token_ids=(), deadline_s=1.0
    )
    assert not message.HasField("prefill")


def test_largest_placement_fits_the_fields_of_the_start_message() -> None:
    largest = GenerationOptions(n=1, max_tokens=9, seed=0)
    request = GenerationRequest(
        RequestContext("r", None, 0.0, 1.0), pack_tokens((1,)), 9, 0, largest
    )
    decode = WorkerAddress(worker_id="d" * 64, epoch="e" * 64, address="h:1")
    placement = Placement(
        placement_id="x" * 64,
        prefill=None,
        decode=decode,
        max_tokens=MAX_TOKENS,
        model=MODEL_INFO,
    )
    sent = start_stream_message(
        request,
        placement,
        attempt=1000,
        max_tokens=placement.max_tokens,
        replayed=[],
        stop_token_ids=[(1 << 32) - 1],
        deadline_s=1.0,
    ).request
    assert (sent.max_tokens, sent.attempt) == (MAX_TOKENS, 1000)
