"""Request bodies of the HTTP API, and their parser, which limits the nesting of the JSON."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import ErrorDetails

from services.common.errors import InvalidRequest
from services.gateway.chats import ChatOptions
from services.gateway.http.body_model import INVALID, UNSUPPORTED, Body, is_deeper
from services.gateway.http.conversation import ConversationFields, Message
from services.gateway.http.other_fields import (
    IN_CHAT,
    IN_COMPLETION,
    IN_STREAM_OPTIONS,
    IN_TOKENIZE,
)
from services.gateway.http.structured import StructuredFields
from services.gateway.request_errors import (
    UnsupportedField,
    check_message_count,
    field_path,
    invalid_field,
)
from services.gateway.requests import GenerationFields, GenerationOptions, MaxTokens


class UnknownField(InvalidRequest):
    """A field that OpenAI's API does not have."""

    code = "unknown_parameter"


# Without `fail_fast`, a list of a million invalid elements would block the event loop for seconds.
# The bounds of ids are checked later, because a check of each element would take as long as all
# other steps of the validation together.
_Id = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
Ids = Annotated[list[_Id], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(Body):
    """Options of a stream."""

    others = IN_STREAM_OPTIONS

    include_usage: Annotated[
        bool, Field(description="send an event with the token usage after the last text")
    ] = False
    continuous_usage_stats: Annotated[
        bool, Field(description="send the token usage so far in each event, as in vLLM")
    ] = False


class _GenerationBody(Body, GenerationFields, StructuredFields):
    """Fields of the HTTP API that completions and chat completions share."""

    model: Annotated[str | None, Field(description="default: the served model")] = None
    stream: Annotated[bool, Field(description="respond with server-sent events")] = False
    stream_options: Annotated[
        StreamOptions | None, Field(description="options of the stream; requires stream")
    ] = None
    return_token_ids: Annotated[
        bool, Field(description="return the token ids of the prompt and of the output, as in vLLM")
    ] = False

    @model_validator(mode="after")
    def _check_stream_options(self) -> "_GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options requires stream", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs are not available in a stream", param="prompt_logprobs"
            )
        return self

    def _options(self, **own: Any) -> GenerationOptions:
        """Return the generation parameters: the shared fields, and those of a subclass."""
        shared = {name: getattr(self, name) for name in GenerationFields.model_fields}
        constraint = self.constraint()
        return GenerationOptions.model_construct(**{**shared, "constraint": constraint, **own})


class CompletionBody(_GenerationBody):
    """Body of ``POST /v1/completions``."""

    others = IN_COMPLETION

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: MaxTokens = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="number of alternatives for each token"),
    ] = None
    echo: Annotated[
        bool,
        Field(description="start the text with the prompt; `logprobs` then includes its tokens"),
    ] = False
    add_special_tokens: Annotated[
        bool, Field(description="add the special tokens around a text, such as BOS, as in vLLM")
    ] = True

    def options(self) -> GenerationOptions:
        """Return the generation parameters."""
        return self._options(logprobs=self.logprobs, echo=self.echo)


class ChatBody(ConversationFields, _GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    others = IN_CHAT

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[
        Annotated[int, Field(ge=1)] | None, Field(description="alias of max_tokens")
    ] = None
    logprobs: Annotated[bool, Field(description="return log probabilities")] = False
    top_logprobs: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="number of alternatives for each token; requires logprobs"),
    ] = None
    parallel_tool_calls: Annotated[
        bool, Field(description="false: only the first tool call is returned, as in vLLM")
    ] = True
    include_reasoning: Annotated[
        bool, Field(description="false: the reasoning is not returned, as in vLLM")
    ] = True

    @property
    def client_names(self) -> dict[str, str]:
        """Maps fields of `GenerationOptions` to their names in this body, where these differ."""
        newer = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"logprobs": "top_logprobs", "max_tokens": newer}

    def options(self) -> GenerationOptions:
        """Return the generation parameters.

        Raises:
            InvalidRequest: if fields contradict each other.
        """
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ: set one of them",
                param="max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs requires logprobs", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._options(max_tokens=older if newer is None else newer, logprobs=logprobs)

    def conversation(self) -> ChatOptions:
        """Return the options of the conversation and of its next message."""
        return self.chat_options(
            parallel=self.parallel_tool_calls, include_reasoning=self.include_reasoning
        )


class TokenizeBody(ConversationFields):
    """Body of ``POST /tokenize``: either a text, or a conversation for the chat template."""

    others = IN_TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: Annotated[
        bool, Field(description="add the special tokens around a text, such as BOS")
    ] = True
    parse_special: Annotated[
        bool, Field(description="convert names of special tokens in the text to these tokens")
    ] = True

    @model_validator(mode="after")
    def _check_conversation(self) -> "TokenizeBody":
        for name, field in ConversationFields.model_fields.items():
            changed = getattr(self, name) != field.get_default(call_default_factory=True)
            if changed and self.messages is None:
                raise InvalidRequest(f"{name} requires messages", param=name)
        return self


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Ids


BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)

_AnyBody = TypeVar("_AnyBody", bound=Body)


def parse_body(
    raw: bytes, body: type[_AnyBody], *, max_depth: int, context_length: int | None
) -> _AnyBody:
    """Parse a request body.

    Args:
        context_length: maximum number of messages and parts of messages; None if it is unknown.

    Raises:
        InvalidRequest: if the body is not JSON in UTF-8, is nested too deeply, or has an invalid
            or unsupported field; ``param`` names the field.
        ContextLengthExceeded: if there are too many messages. They are counted before the slower
            validation.
    """
    content = _load_json(raw)
    if isinstance(content, dict):
        messages = content.get(body.messages_field)
        check_message_count(_count_messages(messages), context_length, body.messages_field)
    if is_deeper(content, raw, max_depth):
        raise InvalidRequest(f"the body is nested deeper than {max_depth} levels")
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object")
    return validate(body, content)


def validate(body: type[_AnyBody], content: dict[str, Any]) -> _AnyBody:
    """Return the body for a JSON object.

    Raises:
        InvalidRequest: if a field is invalid or not supported; ``param`` names it.
    """
    try:
        return body.model_validate(content)
    except ValidationError as error:
        invalid = _first_error(error.errors(include_url=False, include_input=False))
    raise invalid  # outside of `except`, whose error would keep the whole body in memory


def _count_messages(messages: Any) -> int:
    """Return the number of messages.

    A message with several parts, or with tool calls, counts once for each of them.
    """
    if not isinstance(messages, list):
        return 0
    lists = [
        message.get(field)
        for message in messages
        if isinstance(message, dict)
        for field in ("content", "tool_calls")
    ]
    return len(messages) + sum(max(0, len(some) - 1) for some in lists if isinstance(some, list))


def _load_json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        invalid = InvalidRequest(f"the body is not valid JSON in UTF-8: {error}")
    raise invalid  # outside of `except`, as in `parse_body`


def _first_error(errors: Sequence[ErrorDetails]) -> InvalidRequest:
    # Unsupported and unknown fields are reported first: they may have caused the other errors.
    for error in sorted(errors, key=lambda error: error["type"] != UNSUPPORTED):
        if error["type"] in (UNSUPPORTED, INVALID):
            context = error["ctx"]
            param = field_path((*error["loc"], *filter(None, [context["field"]])))
            if error["type"] == INVALID:
                return InvalidRequest(f"{param} {context['reason']}", param=param)
            return UnsupportedField(f"{param} {context['reason']}", param=param)
        if error["type"] == "extra_forbidden":
            param = field_path(error["loc"])
            return UnknownField(f"{param} is not a field of this request", param=param)
    return invalid_field(errors[0])
