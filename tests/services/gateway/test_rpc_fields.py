"""Fields of the gRPC interface: as over HTTP, or refused by name."""

import re
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc, sampling_pb2
from services.common.token_ids import unpack_tokens
from services.gateway.http.schemas import ChatBody, CompletionBody
from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import say
from tests.services.gateway.field_tables import table_rows

SCHEMA = '{"type": "object", "additionalProperties": false}'
USER = pb.ChatMessage(role="user", content="Name a river.")
BEGUN = pb.ChatMessage(role="assistant", content="The Rh")


async def generate(site: Site, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    return [response async for response in stub.Generate(request)]


async def refusal(site: Site, request: pb.GenerateRequest) -> tuple[str, str, str]:
    """Return reason, field and message of the error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(site, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status: Any = rpc_status.from_call(caught.value)
    info, violations = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(violations)
    return info.reason, violations.field_violations[0].field, status.message


async def sent(site: Site, **fields: Any) -> Any:
    """Return the request that a worker gets."""
    await generate(site, pb.GenerateRequest(**fields))
    return site.worker.streams[-1].start.request


def prompt(site: Site, request: Any) -> str:
    tokens = unpack_tokens(request.tokens)
    return site.model.tokenizer.decode(tokens, skip_special=False)


def test_document_lists_the_fields_of_http_that_differ() -> None:
    http = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
    own = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    listed = {
        name
        for row in table_rows("GRPC.md", "| HTTP |")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert listed == http - own


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": SCHEMA},
        {"regex": "[a-z]+"},
        {"choice": sampling_pb2.Choices(texts=["Rhine", "Danube"])},
        {"grammar": 'start: "a"+'},
        {"json_object": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["text", "tokens", "chat"])
async def test_worker_gets_the_constraint(site: Site, constraint: Any, kind: str) -> None:
    site.worker.script = say(5)
    prompts = {"text": "a", "tokens": pb.TokenIds(ids=[5]), "chat": pb.Chat(messages=[USER])}
    given = sampling_pb2.StructuredOutputs(**constraint)
    request = await sent(site, **{kind: prompts[kind]}, structured_outputs=given, seed=3)
    if given.json_object:
        given = sampling_pb2.StructuredOutputs(json='{"type":"object"}')
    assert request.structured_outputs == given
    assert (request.choices, request.sampling.seed) == (1, 3)
    assert not request.output_frame


@pytest.mark.parametrize(
    ("constraint", "field", "reason"),
    [
        ({}, "", "set one constraint"),
        ({"json_object": False}, "", "set one constraint"),
        ({"json": '{"not": {}}'}, ".json", "Unimplemented"),
        ({"json": ""}, ".json", "not valid JSON"),
        ({"regex": ""}, ".regex", "it is empty"),
        ({"regex": "("}, ".regex", "unclosed group"),
        ({"regex": "a" * 70_000}, ".regex", "70000 bytes"),
        ({"choice": sampling_pb2.Choices()}, ".choice", "at least one string"),
        ({"choice": sampling_pb2.Choices(texts=["a", ""])}, ".choice", "not empty"),
        ({"grammar": "start: ("}, ".grammar", "Expected"),
    ],
    ids=str,
)
async def test_invalid_constraint_is_refused(
    site: Site, constraint: Any, field: str, reason: str
) -> None:
    given = sampling_pb2.StructuredOutputs(**constraint)
    request = pb.GenerateRequest(text="a", structured_outputs=given)
    code, param, message = await refusal(site, request)
    assert (code, param) == ("INVALID_VALUE", f"structured_outputs{field}")
    assert reason in message
    assert not site.worker.streams


async def test_last_message_is_continued(site: Site) -> None:
    site.worker.script = say(5)
    messages = [USER, BEGUN]
    new, continued, ended = [
        prompt(site, await sent(site, chat=pb.Chat(messages=messages, **options)))
        for options in ({}, {"continue_final_message": True}, {"add_generation_prompt": False})
    ]
    assert continued.endswith("assistant\nThe Rh")
    assert ended.startswith(continued)
    assert new == f"{ended}<|im_start|>assistant\n"
    explicit = pb.Chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt(site, await sent(site, chat=explicit)) == continued


async def test_special_tokens_of_a_text(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.worker.script = say(5)
    asked: list[bool] = []
    encode = site.gateway.prompts.encode_prompt

    async def recorded(*args: Any, add_special: bool, **options: Any) -> bytes:
        asked.append(add_special)
        return await encode(*args, add_special=add_special, **options)

    monkeypatch.setattr(site.gateway.prompts, "encode_prompt", recorded)
    for options in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        await sent(site, text="a", **options)
    assert asked == [True, True, False]


CHAT = pb.Chat(messages=[USER])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ({"tokens": pb.TokenIds(ids=[5]), "add_special_tokens": False}, "add_special_tokens"),
        (
            {
                "chat": pb.Chat(
                    messages=[USER], add_generation_prompt=True, continue_final_message=True
                )
            },
            "continue_final_message",
        ),
        ({"chat": pb.Chat(continue_final_message=True)}, "messages"),
        (
            {
                "text": "a",
                "ignore_eos": True,
                "structured_outputs": sampling_pb2.StructuredOutputs(regex="a"),
            },
            "ignore_eos",
        ),
    ],
    ids=str,
)
async def test_fields_that_cannot_be_combined(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal(site, pb.GenerateRequest(**fields)))[1] == param


UNKNOWN = b"\x92\x3e\x01x"
"""Field 994, of the wire type of texts and messages."""


@pytest.mark.parametrize(
    ("request_bytes", "param"),
    [
        (pb.GenerateRequest(text="a").SerializeToString() + UNKNOWN, "994"),
        (b"\x22" + bytes([len(UNKNOWN)]) + UNKNOWN, "chat.994"),
        (
            b"\x22" + bytes([2 + len(UNKNOWN)]) + b"\x0a" + bytes([len(UNKNOWN)]) + UNKNOWN,
            "chat.messages.994",
        ),
    ],
)
async def test_unknown_field_is_refused_by_number(
    site: Site, request_bytes: bytes, param: str
) -> None:
    code, field, message = await refusal(site, pb.GenerateRequest.FromString(request_bytes))
    assert (code, field) == ("UNSUPPORTED_PARAMETER", param)
    assert message == f"field number {param} is not known to this server"
