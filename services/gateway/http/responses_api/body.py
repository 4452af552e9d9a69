"""Body of ``POST /v1/responses``, and its conversion to a chat."""

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.http.body_model import Body
from services.gateway.http.chat_request import ChatRequest
from services.gateway.http.field_names import FieldNames
from services.gateway.http.other_fields import (
    IN_RESPONSES,
    IN_RESPONSES_REASONING,
    IN_RESPONSES_TEXT,
    IN_STREAM_OPTIONS,
)
from services.gateway.http.responses_api.items import Conversation, Input, MessageItem
from services.gateway.http.responses_api.tools import ResponsesTool, offered_functions
from services.gateway.requests import Temperature, TopP

_PATHS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Paths of fields that have other names in a chat."""


class TextFormat(Body):
    """Format of the text in the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[
        dict[str, Any] | None, Field(alias="schema", description="JSON schema, for json_schema")
    ] = None
    strict: Annotated[bool, Field(description="ignored: the text always follows the schema")] = (
        False
    )

    def as_chat(self) -> dict[str, Any]:
        """Return the ``response_format`` of a `ChatBody`."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, "json_schema": schema}

    def as_json(self) -> dict[str, Any]:
        """Return the format for the answer."""
        return self.model_dump(exclude_unset=True, by_alias=True)


class TextOptions(Body):
    """Options of the text in the answer."""

    others = IN_RESPONSES_TEXT

    format: Annotated[TextFormat, Field(description="constrain the text to JSON")] = TextFormat(
        type="text"
    )


class ReasoningOptions(Body):
    """Options of the reasoning. Its text is always in the answer."""

    others = IN_RESPONSES_REASONING

    effort: Annotated[
        str | None, Field(description="see `reasoning_effort` of chat completions")
    ] = None


class ResponsesStreamOptions(Body):
    """Options of a stream."""

    others = IN_STREAM_OPTIONS


class ResponsesBody(Body):
    """Body of ``POST /v1/responses``."""

    others = IN_RESPONSES
    messages_field = "input"

    model: Annotated[str | None, Field(description="default: the served model")] = None
    input: Annotated[Input, Field(description="a message of the user, or items")]
    instructions: Annotated[
        str | None, Field(description="message of the system before the input")
    ] = None
    tools: Annotated[
        list[ResponsesTool],
        Field(fail_fast=True, description="functions that the model may call"),
    ] = Field(default_factory=list)
    tool_choice: Annotated[
        str | dict[str, Any], Field(description="see `tool_choice` of chat completions")
    ] = "auto"
    parallel_tool_calls: Annotated[
        bool, Field(description="false: only the first call is returned")
    ] = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    max_output_tokens: (
        Annotated[int, Field(ge=1, description="maximum output tokens, with reasoning")] | None
    ) = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    metadata: Annotated[dict[str, str], Field(description="returned in the answer")] = Field(
        default_factory=dict
    )
    stream: Annotated[bool, Field(description="respond with server-sent events")] = False
    stream_options: ResponsesStreamOptions | None = None

    def as_chat(self) -> ChatRequest:
        """Return the chat of which the response is the next message.

        Raises:
            InvalidRequest: if a field of the chat is invalid; ``param`` names that of this body.
        """
        conversation, functions = self._conversation(), offered_functions(self.tools)
        content: dict[str, Any] = {
            "messages": conversation.messages,
            "tools": [function.as_chat() for function in functions],
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.as_chat(),
            "reasoning_effort": self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        tools = {f"tools[{at}].function": one.path for at, one in enumerate(functions)}
        return ChatRequest.of(content, FieldNames({**_PATHS, **tools, **conversation.paths}))

    def _conversation(self) -> Conversation:
        conversation = Conversation()
        if self.instructions is not None:
            conversation.add(MessageItem(role="system", content=self.instructions), "instructions")
        if isinstance(self.input, str):
            conversation.add(MessageItem(role="user", content=self.input), "input")
        else:
            for at, item in enumerate(self.input):
                conversation.add(item, f"input[{at}]")
        return conversation


def _chat_tool_choice(choice: str | dict[str, Any]) -> Any:
    """Return the ``tool_choice`` of a `ChatBody`, which nests what a choice has beside its type."""
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    rest = {name: value for name, value in choice.items() if name != "type"}
    if kind not in ("function", "allowed_tools"):
        return {"type": kind}
    return {"type": kind, kind: rest}
