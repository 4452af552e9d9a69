"""Response bodies of the HTTP API, used in the OpenAPI document only."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Response):
    """Description of an error."""

    message: str
    type: str
    param: Annotated[str | None, Field(description="path of the invalid field")]
    code: Annotated[str | None, Field(description="machine-readable identifier of the error")]


class ErrorResponse(_Response):
    """Body of every error."""

    error: ErrorDetail


class PromptTokensDetails(_Response):
    """Parts of the prompt tokens of a request."""

    cached_tokens: Annotated[
        int, Field(description="prompt tokens that were not computed, because their KV was cached")
    ]


class Usage(_Response):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
PromptTokenIds = Annotated[
    list[int], Field(description="token ids of the prompt, with `return_token_ids` only")
]
OutputTokenIds = Annotated[
    list[int],
    Field(
        description="token ids of the output, with those of an end-of-sequence token or of a stop "
        "string that ended it; with `return_token_ids` only"
    ),
]


class CompletionLogprobs(_Response):
    """Log probabilities of the output tokens and, with `echo`, of the prompt's tokens before."""

    tokens: Annotated[
        list[str], Field(description="texts; `bytes:` and hex codes for incomplete characters")
    ]
    token_logprobs: Annotated[
        list[float | None], Field(description="null for the first token of an echoed prompt")
    ]
    top_logprobs: Annotated[
        list[dict[str, float] | None],
        Field(
            description="for each token, the most likely tokens and the token itself; null for the "
            "first token of an echoed prompt"
        ),
    ]
    text_offset: Annotated[
        list[int], Field(description="position of each token in the text, in characters")
    ]


class PromptToken(_Response):
    """A prompt token or an alternative to it."""

    logprob: float
    rank: Annotated[int, Field(description="rank by probability, from 1")]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptToken] | None],
    Field(
        description="for each token of the prompt, the most likely tokens and the token itself, by "
        "token id; null for the first token; with `prompt_logprobs` only"
    ),
]


class CompletionChoice(_Response):
    """Output of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: OutputTokenIds = Field(default_factory=list)
    prompt_token_ids: PromptTokenIds = Field(default_factory=list)
    prompt_logprobs: PromptLogprobs = Field(default_factory=list)


class CompletionResponse(_Response):
    """Response of ``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Field(description="seconds since 1970")]
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenAlternative(_Response):
    """A token with its log probability and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TokenAlternative):
    """An output token with its most likely alternatives."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(_Response):
    """Log probabilities of the output tokens."""

    content: list[TokenLogprob]


class CalledFunction(_Response):
    """The function that the model calls."""

    name: str
    arguments: Annotated[
        str, Field(description="JSON text as the model wrote it, which may be invalid")
    ]


class ToolCall(_Response):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Response):
    """The message of the assistant."""

    role: Literal["assistant"]
    content: Annotated[
        str | None, Field(description="null if there are only tool calls or reasoning")
    ]
    reasoning_content: Annotated[
        str, Field(description="text of the reasoning block, if there is one")
    ] = ""
    reasoning: Annotated[str, Field(description="the same as reasoning_content")] = ""
    tool_calls: Annotated[list[ToolCall], Field(description="if the model calls tools")] = Field(
        default_factory=list
    )


class ChatChoice(_Response):
    """Output of one choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[
        ChatFinishReason,
        Field(description="tool_calls if the output ended with complete tool calls"),
    ]
    token_ids: OutputTokenIds = Field(default_factory=list)


class ChatResponse(_Response):
    """Response of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: Annotated[int, Field(description="seconds since 1970")]
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: PromptTokenIds = Field(default_factory=list)
    prompt_logprobs: PromptLogprobs = Field(default_factory=list)


class TokenizeResponse(_Response):
    """Response of ``POST /tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int | None


class DetokenizeResponse(_Response):
    """Response of ``POST /detokenize``."""

    prompt: str


class ModelResponse(_Response):
    """The served model.

    ``max_model_len`` is the maximum number of tokens of a prompt and its output: the context length
    of the model, or the number of tokens that fit in the workers' KV pages, whichever is smaller.
    It is null until a router reports it.
    """

    id: str
    object: Literal["model"]
    created: Annotated[int, Field(description="seconds since 1970")]
    owned_by: str
    max_model_len: int | None


class ModelListResponse(_Response):
    """Response of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelResponse]


class HealthResponse(_Response):
    """Response of ``GET /health``."""

    status: Literal["ok"]


class ReadyResponse(_Response):
    """Response of ``GET /ready`` if requests can be served."""

    status: Literal["ready"]


class NotReadyResponse(_Response):
    """Response of ``GET /ready`` with status 503."""

    status: Literal["not ready"]
    reason: str


class VersionResponse(_Response):
    """Response of ``GET /version``."""

    version: str
