"""Conversations in request bodies: messages, tools, and options of the chat template."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.errors import InvalidRequest
from services.gateway.chats import ChatOptions, adds_generation_prompt
from services.gateway.http.body_model import Body, check_type, invalid, is_deeper
from services.gateway.http.call_arguments import parse_arguments
from services.gateway.http.other_fields import (
    IN_CALLED_FUNCTION,
    IN_MESSAGE,
    IN_PART,
    IN_TOOL,
    IN_TOOL_CALL,
    OtherFields,
)
from services.gateway.http.tool_choice import NamedTool, ToolChoice, ToolName

_MAX_ARGUMENTS_DEPTH = 128
"""Maximum nesting of the arguments of a call, which chat templates write with recursion."""


class TextPart(Body):
    """A text part of a message."""

    others = IN_PART

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, content: Any) -> Any:
        return check_type(content, "text")


class CalledFunction(Body):
    """The function of a call, and its arguments."""

    others = IN_CALLED_FUNCTION

    name: ToolName
    arguments: Annotated[
        str, Field(description="a JSON object, or as much of one as the assistant has written")
    ]

    @model_validator(mode="after")
    def _check_arguments(self) -> "CalledFunction":
        self.parsed()
        return self

    def parsed(self) -> dict[str, Any]:
        """Return the arguments, as chat templates take them."""
        arguments = parse_arguments(self.arguments)
        if is_deeper(arguments, self.arguments.encode(), _MAX_ARGUMENTS_DEPTH):
            raise invalid("arguments", f"is nested deeper than {_MAX_ARGUMENTS_DEPTH} levels")
        return arguments


class ToolCall(Body):
    """A call that the assistant has made."""

    others = IN_TOOL_CALL

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, content: Any) -> Any:
        return check_type(content, "function")

    def as_template_input(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.parsed()}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    """A message of a conversation."""

    others = IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)] | None,
        Field(description="may be null in messages of the assistant that have tool calls"),
    ] = None
    tool_calls: Annotated[
        list[ToolCall], Field(fail_fast=True, description="calls of the assistant")
    ] = Field(default_factory=list)
    tool_call_id: Annotated[
        str | None, Field(description="call of which a message of the role tool has the result")
    ] = None
    reasoning_content: Annotated[
        str | None, Field(description="reasoning of the assistant, for templates that use it")
    ] = None
    reasoning: Annotated[str | None, Field(description="other name of reasoning_content")] = None

    @model_validator(mode="after")
    def _check_fields_of_role(self) -> "Message":
        is_assistant = self.role == "assistant"
        if self.content is None and not (is_assistant and self.tool_calls):
            raise invalid("content", "is required")
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, name) and not is_assistant:
                raise invalid(name, "belongs to messages of the assistant only")
        if self.tool_call_id is None and self.role == "tool":
            raise invalid("tool_call_id", "is required in a message of the role tool")
        if self.tool_call_id is not None and self.role != "tool":
            raise invalid("tool_call_id", "belongs to messages of the role tool only")
        if None not in (self.reasoning, self.reasoning_content) and (
            self.reasoning != self.reasoning_content
        ):
            raise invalid("reasoning", "differs from reasoning_content: set one of them")
        return self

    def as_template_input(self) -> dict[str, Any]:
        """Return the message as `ChatTemplate.render` expects it."""
        content: Any = self.content
        if isinstance(content, list):
            content = [part.model_dump() for part in content]
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message


class Function(Body):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, Field(description="JSON schema of the arguments; default: none")
    ] = None
    strict: Annotated[bool, Field(description="the arguments of each call follow the schema")] = (
        False
    )


class Tool(Body):
    """A tool that the model may call."""

    others = IN_TOOL

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, content: Any) -> Any:
        return check_type(content, "function")

    def as_template_input(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": self.type, "function": function}


class ConversationFields(Body):
    """Fields that determine the prompt of a conversation."""

    others: ClassVar[OtherFields] = {}

    tools: Annotated[
        list[Tool], Field(fail_fast=True, description="tools that the model may call")
    ] = Field(default_factory=list)
    tool_choice: Annotated[
        ToolChoice,
        Field(
            description="none: tools are not shown to the model; required: it calls a tool; an "
            "object: it calls this one"
        ),
    ] = "auto"
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(
            description="variable of the chat template; those with a switch for reasoning get it"
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="variables of the chat template, as in vLLM")
    ] = Field(default_factory=dict)
    add_generation_prompt: Annotated[
        bool | None,
        Field(
            description="end the prompt with the start of the assistant's message; default: true, "
            "unless continue_final_message is"
        ),
    ] = None
    continue_final_message: Annotated[
        bool, Field(description="continue the last message instead of beginning a new one")
    ] = False

    @model_validator(mode="after")
    def _check_end(self) -> "ConversationFields":
        self._adds_generation_prompt()
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> "ConversationFields":
        choice, names = self.tool_choice, {tool.function.name for tool in self.tools}
        if choice == "required" and not names:
            raise InvalidRequest("tool_choice requires tools", param="tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice.function.name {choice.function.name!r} is not in tools",
                param="tool_choice.function.name",
            )
        return self

    def chat_options(self, *, parallel: bool = True, include_reasoning: bool = True) -> ChatOptions:
        """Return the options of the conversation.

        Args:
            parallel: whether the message may have several calls.
            include_reasoning: whether the message has the reasoning.
        """
        choice = self.tool_choice
        return ChatOptions(
            tools=() if choice == "none" else tuple(self._template_tools()),
            requires_calls=choice == "required" or isinstance(choice, NamedTool),
            called_name=choice.function.name if isinstance(choice, NamedTool) else None,
            strict=frozenset(tool.function.name for tool in self.tools if tool.function.strict),
            parallel_tool_calls=parallel,
            include_reasoning=include_reasoning,
            reasoning_effort=self.reasoning_effort,
            template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self._adds_generation_prompt(),
            continue_final_message=self.continue_final_message,
        )

    def _adds_generation_prompt(self) -> bool:
        wanted, continues = self.add_generation_prompt, self.continue_final_message
        return adds_generation_prompt(wanted, continues=continues)

    def _template_tools(self) -> list[dict[str, Any]]:
        return [tool.as_template_input() for tool in self.tools]
