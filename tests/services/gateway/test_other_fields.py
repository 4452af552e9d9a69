"""Fields and paths that are not implemented: ignored where they change nothing, else refused."""

import json
import re
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_create_params

from services.common.errors import InvalidRequest
from services.gateway.http.conversation import Message, TextPart, Tool, ToolCall
from services.gateway.http.other_fields import (
    IN_CALLED_FUNCTION,
    IN_CHAT,
    IN_COMPLETION,
    IN_MESSAGE,
    IN_PART,
    IN_REQUEST,
    IN_STREAM_OPTIONS,
    IN_TOOL,
    IN_TOOL_CALL,
)
from services.gateway.http.other_paths import NOT_SUPPORTED
from services.gateway.http.schemas import (
    ChatBody,
    CompletionBody,
    StreamOptions,
    TokenizeBody,
    parse_body,
)
from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import say
from tests.services.gateway.field_tables import expected_rows, table_rows

SERVED = ("/v1/responses", "/v1/messages/batches")
"""Paths of `NOT_SUPPORTED` that are served themselves, or that have another form of errors."""
USER = {"role": "user", "content": "hi"}
PLACES = {
    "": IN_REQUEST,
    "completion.": {k: v for k, v in IN_COMPLETION.items() if k not in IN_REQUEST},
    "chat.": {k: v for k, v in IN_CHAT.items() if k not in IN_REQUEST},
    "stream_options.": IN_STREAM_OPTIONS,
    "messages[].": IN_MESSAGE,
    "messages[].content[].": IN_PART,
    "messages[].tool_calls[].": IN_TOOL_CALL,
    "messages[].tool_calls[].function.": IN_CALLED_FUNCTION,
    "tools[].": IN_TOOL,
}

# What benchmarks and libraries send, beside the prompt, if they are not configured otherwise.
CLIENTS: dict[str, tuple[type[ChatBody | CompletionBody], dict[str, Any]]] = {
    "guidellm": (
        CompletionBody,
        {
            "prompt": "x",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 8,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    "SGLang's bench_serving": (
        CompletionBody,
        {"prompt": "x", "temperature": 0.0, "best_of": 1, "stream": True, "ignore_eos": True},
    ),
    "vLLM's bench serve": (
        CompletionBody,
        {"prompt": "x", "repetition_penalty": 1.0, "logprobs": None, "stream": True},
    ),
    "aiperf": (
        ChatBody,
        {
            "messages": [{**USER, "name": "User"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 8,
            "min_tokens": 8,
            "ignore_eos": True,
        },
    ),
    "LangChain": (
        ChatBody,
        {
            "messages": [
                {"role": "system", "content": "x", "name": None},
                {"role": "assistant", "content": "y", "tool_calls": [], "refusal": None},
                USER,
            ],
            "n": 1,
            "stream": False,
            "metadata": {"run": "1"},
            "store": False,
            "service_tier": "default",
            "parallel_tool_calls": False,
        },
    ),
    "LlamaIndex": (ChatBody, {"messages": [USER], "logprobs": None, "top_logprobs": 0, "seed": 1}),
    "LiteLLM": (
        ChatBody,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
                    ],
                }
            ],
            "user": "team",
            "tools": [],
            "functions": [],
            "logit_bias": {},
        },
    ),
    "an SDK that repeats a response": (
        ChatBody,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "y",
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": None,
                    "reasoning_content": "",
                },
                USER,
            ]
        },
    ),
    "editors": (
        ChatBody,
        {
            "messages": [USER],
            "prompt_cache_key": "k",
            "safety_identifier": "u",
            "prediction": {"type": "content", "content": "x"},
            "tool_choice": "auto",
            "reasoning_effort": None,
            "verbosity": "medium",
            "stream": True,
            "stream_options": {"include_obfuscation": False},
        },
    ),
    "clients of vLLM": (
        ChatBody,
        {
            "messages": [USER],
            "chat_template_kwargs": {},
            "add_generation_prompt": True,
            "add_special_tokens": False,
            "skip_special_tokens": True,
            "use_beam_search": False,
            "length_penalty": 1.0,
            "stop_token_ids": [],
            "bad_words": [],
            "include_stop_str_in_output": False,
            "cache_salt": "s",
        },
    ),
}

CHANGING: list[dict[str, Any]] = [
    {"store": True},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"guided_whitespace_pattern": " "},
    {"n": 2, "best_of": 3},
    {"best_of": 2},
    {"best_of": True},
    {"echo": True},
    {"echo": 0},
    {"suffix": "x"},
    {"modalities": ["text", "audio"]},
    {"verbosity": "low"},
    {"web_search_options": {}},
    {"add_special_tokens": True},
    {"length_penalty": 1.5},
    {"stream": True, "stream_options": {"include_obfuscation": True}},
    {"messages": [{**USER, "function_call": {}}]},
]
CHANGING_COMPLETIONS: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "required"},
    {"reasoning_effort": "low"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"continue_final_message": True},
    {"add_generation_prompt": False},
    {"include_reasoning": False},
]


def parse(body: type[Any], content: dict[str, Any]) -> Any:
    return parse_body(json.dumps(content).encode(), body, max_depth=16, context_length=99)


@pytest.mark.parametrize("client", CLIENTS)
def test_requests_of_clients_are_parsed(client: str) -> None:
    body, content = CLIENTS[client]
    parse(body, content).options()


@pytest.mark.parametrize("changes", CHANGING, ids=json.dumps)
def test_value_that_changes_the_answer_is_refused_by_name(changes: dict[str, Any]) -> None:
    check_unsupported(ChatBody, {"messages": [USER], **changes}, changes)


@pytest.mark.parametrize("changes", CHANGING_COMPLETIONS, ids=json.dumps)
def test_field_of_chats_is_refused_by_name_in_a_completion(changes: dict[str, Any]) -> None:
    check_unsupported(CompletionBody, {"prompt": "x", **changes}, changes)


def check_unsupported(body: type[Any], content: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, content)
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param is not None
    name = re.split(r"\W", caught.value.param)[-1]
    assert name in json.dumps(changes)
    assert caught.value.message.startswith(f"{caught.value.param} is not supported")


def test_unknown_field_is_refused_even_if_it_is_null() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatBody, {"messages": [USER], "temprature": None})
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "temprature")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal", "x" * 1000])
def test_part_that_is_not_text_is_refused_by_its_type(kind: str) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:image/png;,"}}]
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatBody, {"messages": [USER, {"role": "user", "content": parts}]})
    error = caught.value
    assert (error.param, error.code) == ("messages[1].content[1].type", "unsupported_parameter")
    assert kind[:40] in error.message
    assert "only 'text' is supported" in error.message
    assert len(error.message) < 200


def test_every_field_of_the_openai_library_is_declared() -> None:
    """A field that a newer version adds must be classified."""
    chat = chat_create_params.CompletionCreateParamsNonStreaming
    completion = completion_create_params.CompletionCreateParamsNonStreaming
    messages = (
        ChatCompletionUserMessageParam,
        ChatCompletionAssistantMessageParam,
        ChatCompletionToolMessageParam,
    )
    declared: list[tuple[Any, Any]] = [
        (chat, ChatBody),
        (completion, CompletionBody),
        (ChatCompletionStreamOptionsParam, StreamOptions),
        (ChatCompletionContentPartTextParam, TextPart),
        (ChatCompletionFunctionToolParam, Tool),
        (ChatCompletionMessageFunctionToolCallParam, ToolCall),
        *((message, Message) for message in messages),
    ]
    for params, body in declared:
        fields = params.__required_keys__ | params.__optional_keys__
        assert fields <= body.model_fields.keys() | body.others.keys()


def test_no_field_is_both_implemented_and_declared_as_not_implemented() -> None:
    bodies = (ChatBody, CompletionBody, TokenizeBody, Message, StreamOptions, TextPart)
    for body in (*bodies, Tool, ToolCall):
        assert not body.model_fields.keys() & body.others.keys()


def test_documentation_lists_the_declared_fields() -> None:
    assert table_rows("FIELDS.md", "| ignored values | fields |") == expected_rows(PLACES)


async def test_openapi_document_has_the_declared_fields(site: Site) -> None:
    schemas = (await site.http.get("/openapi.json")).json()["components"]["schemas"]
    properties = schemas["ChatBody"]["properties"]
    assert IN_CHAT.keys() <= properties.keys()
    assert properties["metadata"] == {"description": "ignored", "x-supported": False}
    unsupported = {name for name, schema in properties.items() if not schema.get("x-supported", 1)}
    assert unsupported == ChatBody.others.keys()
    assert properties["store"]["anyOf"] == [{"const": False}, {"type": "null"}]
    assert "name" in schemas["Message"]["properties"]
    assert "include_obfuscation" in schemas["StreamOptions"]["properties"]


@pytest.mark.parametrize(
    "path",
    [
        *(path for path in NOT_SUPPORTED if path not in SERVED),
        *("/v1/audio/speech", "/v1/responses/r1", "/v1/responses/r1/cancel"),
    ],
)
async def test_path_of_another_api_says_what_is_not_supported(site: Site, path: str) -> None:
    response = await site.http.post(path, json={"model": "m", "input": "x"})
    error = response.json()["error"]
    assert response.status_code == 404
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_endpoint")
    assert path in error["message"]
    assert "is not supported" in error["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/models", "/apis", "/" + "x" * 5000])
async def test_unknown_path_is_named(site: Site, path: str) -> None:
    response = await site.http.get(path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unknown_url")
    assert path[:100] in error["message"]
    assert "below /v1" in error["message"]
    assert len(error["message"]) < 300


async def test_continuous_usage_is_in_every_event(site: Site) -> None:
    site.worker.script = say(*site.encode("one two three"))
    count, prompt = len(site.encode("one two three")), len(site.encode("x"))
    for path, body in (
        ("/v1/completions", {"prompt": "x", "n": 1}),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [USER]}),
    ):
        for final in (True, False):
            options = {"continuous_usage_stats": True, "include_usage": final}
            sent = {**body, "stream": True, "stream_options": options}
            text = (await site.http.post(path, json=sent)).text
            events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert set(counts) >= set(range(1, count + 1))
            assert (events[-1]["choices"] == []) == final
            for usage in (event["usage"] for event in events):
                total = usage["prompt_tokens"] + usage["completion_tokens"]
                assert usage["total_tokens"] == total
                assert path != "/v1/completions" or usage["prompt_tokens"] == prompt
