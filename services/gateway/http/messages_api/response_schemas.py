"""Response bodies of the Messages API, used in the OpenAPI document only."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AnswerText(_Part):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class AnswerThinking(_Part):
    """Reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Literal[""], Field(description="reasoning is not signed")]


class AnswerToolUse(_Part):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[
        dict[str, Any],
        Field(description="the complete part of arguments that are cut; empty if they are invalid"),
    ]


class ThinkingTokens(_Part):
    """Parts of the output tokens."""

    thinking_tokens: Annotated[
        int, Field(description="tokens of the reasoning block, with its tags")
    ]


class MessagesUsage(_Part):
    """Token counts of a message."""

    input_tokens: Annotated[int, Field(description="tokens of the prompt that were not cached")]
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Annotated[
        int, Field(description="tokens of the prompt that were not computed")
    ]
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessagesResponse(_Part):
    """Response of ``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[
        Annotated[AnswerText | AnswerThinking | AnswerToolUse, Field(discriminator="type")]
    ]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class CountTokensResponse(_Part):
    """Response of ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class MessagesErrorDetail(_Part):
    """Description of an error."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str


class MessagesErrorResponse(_Part):
    """Body of errors of the Messages API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str
