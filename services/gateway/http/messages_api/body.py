"""Bodies of ``POST /v1/messages`` and of its counting of tokens, and their conversion to chats."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from services.gateway.http.body_model import Body, check_kind
from services.gateway.http.chat_request import ChatRequest
from services.gateway.http.field_names import FieldNames
from services.gateway.http.messages_api.blocks import Conversation, InputMessage, Text
from services.gateway.http.other_fields import (
    IN_MESSAGES_PROMPT,
    IN_MESSAGES_THINKING,
    IN_MESSAGES_TOOL,
)
from services.gateway.request_errors import UnsupportedField
from services.gateway.requests import Temperature, TopK, TopP

_VERSION_HEADER = "anthropic-version"
_VERSIONS = ("2023-06-01", "2026-10-21")
"""Supported versions of the interface. The later one only removes fields, which are kept here."""
_PATHS = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "tool_choice.function": "tool_choice",
}
"""Paths of fields that have other names in a chat."""


class CustomTool(Body):
    """A tool that the model may call."""

    others = IN_MESSAGES_TOOL

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: Annotated[dict[str, Any], Field(description="JSON schema of the input")]
    strict: Annotated[bool, Field(description="the input of each call follows the schema")] = False

    def as_chat(self) -> dict[str, Any]:
        """Return the tool of a `ChatBody`."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


class ToolChoiceOptions(Body):
    """Whether the model may, must or must not call tools."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        Field(description="any: it calls a tool; tool: it calls this one"),
    ]
    name: Annotated[str | None, Field(description="name of the tool, for the type tool")] = None
    disable_parallel_tool_use: Annotated[
        bool, Field(description="true: only the first call is returned")
    ] = False

    def as_chat(self) -> Any:
        """Return the ``tool_choice`` of a `ChatBody`."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingOptions(Body):
    """Whether the model reasons before it answers."""

    others = IN_MESSAGES_THINKING

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"],
        Field(description="adaptive, as without this object: the default of the model"),
    ]
    display: Annotated[
        Literal["summarized", "updates", "omitted"],
        Field(description="omitted: the answer is without the reasoning, else it has all of it"),
    ] = "summarized"


class JsonFormat(Body):
    """Constraint on the text of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="JSON schema")]


class OutputConfig(Body):
    """Options of the answer."""

    effort: Annotated[
        str | None,
        Field(
            description="as `reasoning_effort` of chat completions; ignored if the model has none"
        ),
    ] = None
    format: Annotated[
        JsonFormat | None, Field(description="constrain the text to a JSON schema")
    ] = None


class CountTokensBody(Body):
    """Body of ``POST /v1/messages/count_tokens``: the fields that determine the prompt."""

    others = IN_MESSAGES_PROMPT

    model: Annotated[str | None, Field(description="default: the served model")] = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Annotated[Text | None, Field(description="message of the system")] = None
    tools: Annotated[
        list[Annotated[CustomTool, BeforeValidator(check_kind("custom", default="custom"))]],
        Field(fail_fast=True, description="tools that the model may call"),
    ] = Field(default_factory=list)
    tool_choice: ToolChoiceOptions | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig = OutputConfig()

    def as_chat(self) -> ChatRequest:
        """Return the chat of which the answer is the next message.

        Raises:
            InvalidRequest: if a field of the chat is invalid; ``param`` names that of this body.
        """
        conversation = self._conversation()
        content: dict[str, Any] = {
            "messages": conversation.messages,
            "tools": [tool.as_chat() for tool in self.tools],
            "reasoning_effort": self.output_config.effort,
            "continue_final_message": self.messages[-1].is_prefill,
            "include_reasoning": self.thinking is None or self.thinking.display != "omitted",
            **self._sampling(),
        }
        if (format := self.output_config.format) is not None:
            schema = {"schema": format.schema_}
            content["response_format"] = {"type": format.type, "json_schema": schema}
        if (choice := self.tool_choice) is not None:
            content["tool_choice"] = choice.as_chat()
            content["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        names = FieldNames({**_PATHS, **self._tool_paths(), **conversation.paths})
        # An effort concerns all output, and Claude Code sends it to every model.
        return ChatRequest.of(content, names, thinking=self._thinking(), requires_effort=False)

    def _sampling(self) -> dict[str, Any]:
        """Return the fields of a `ChatBody` that do not determine the prompt."""
        return {}

    def _thinking(self) -> bool | None:
        kind = self.thinking.type if self.thinking else "adaptive"
        return None if kind == "adaptive" else kind == "enabled"

    def _conversation(self) -> Conversation:
        conversation = Conversation()
        if self.system is not None:
            conversation.add_system(self.system)
        for at, message in enumerate(self.messages):
            conversation.add(message, f"messages[{at}]")
        return conversation

    def _tool_paths(self) -> dict[str, str]:
        paths = {}
        for at in range(len(self.tools)):
            paths[f"tools[{at}].function"] = f"tools[{at}]"
            paths[f"tools[{at}].function.parameters"] = f"tools[{at}].input_schema"
        return paths


class MessagesBody(CountTokensBody):
    """Body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, description="maximum output tokens, with thinking")]
    stop_sequences: Annotated[
        list[str],
        Field(fail_fast=True, description="texts that end the output, which does not include them"),
    ] = Field(default_factory=list)
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    stream: Annotated[bool, Field(description="respond with server-sent events")] = False

    def _sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def check_version(headers: Mapping[str, str]) -> None:
    """Raise `UnsupportedField` if the client wants another version of the interface."""
    version = headers.get(_VERSION_HEADER)
    if version is not None and version not in _VERSIONS:
        raise UnsupportedField(
            f"{_VERSION_HEADER} is not supported, only {' and '.join(_VERSIONS)}",
            param=_VERSION_HEADER,
        )
