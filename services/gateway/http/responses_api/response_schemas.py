"""Response bodies of the Responses API, used in the OpenAPI document only."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

_Status = Literal["in_progress", "completed", "incomplete"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OutputText(_Part):
    """A text of the assistant."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: Annotated[list[Any], Field(max_length=0)]


class OutputMessage(_Part):
    """Text of the answer."""

    id: str
    type: Literal["message"]
    status: _Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(_Part):
    """Text of the reasoning block of the model."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(_Part):
    """Reasoning of the model."""

    id: str
    type: Literal["reasoning"]
    status: _Status
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[ReasoningText]


class OutputCall(_Part):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: _Status
    call_id: str
    name: str
    namespace: Annotated[
        str | SkipJsonSchema[None],
        Field(description="only for a function that was offered in a namespace"),
    ] = None
    arguments: Annotated[
        str, Field(description="JSON text as the model wrote it, which may be invalid")
    ]


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class ResponsesError(_Part):
    """Error that ended a stream."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(_Part):
    """Reason why the output is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(_Part):
    """Parts of the input tokens."""

    cached_tokens: Annotated[
        int, Field(description="input tokens that were not computed, because their KV was cached")
    ]


class OutputTokensDetails(_Part):
    """Parts of the output tokens."""

    reasoning_tokens: Annotated[
        int, Field(description="tokens of the reasoning block, with its tags")
    ]


class ResponsesUsage(_Part):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ReasoningEcho(_Part):
    """Options of the reasoning."""

    effort: str | None
    summary: None


class TextEcho(_Part):
    """Options of the text."""

    format: dict[str, Any]


class ResponsesResponse(_Part):
    """Response of ``POST /v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="seconds since 1970")]
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponsesError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningEcho
    store: Annotated[Literal[False], Field(description="responses are not stored")]
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
