"""Items of the input of a response, and their conversion to messages of a chat."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from services.gateway.http.body_model import Body, check_kind, tag_of_kind
from services.gateway.http.other_fields import (
    IN_RESPONSES_CALL_ITEM,
    IN_RESPONSES_ITEM,
    IN_RESPONSES_OUTPUT_ITEM,
    IN_RESPONSES_PART,
    IN_RESPONSES_REASONING_ITEM,
)
from services.gateway.http.responses_api.tools import chat_name


class InputText(Body):
    """A text in a message or in the output of a function."""

    others = IN_RESPONSES_PART

    type: Literal["input_text", "output_text"]
    text: str


class ReasoningPart(Body):
    """A text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


_Parts = Annotated[
    list[Annotated[InputText, BeforeValidator(check_kind("input_text", "output_text"))]],
    Field(fail_fast=True),
]
_TEXT, _LIST = "a text", "a list"
"""Names of the forms of a content."""


def _form(content: Any) -> str:
    return _TEXT if isinstance(content, str) else _LIST


Text = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[_Parts, Tag(_LIST)],
    Discriminator(_form),
]


class MessageItem(Body):
    """A message of the conversation."""

    others = IN_RESPONSES_ITEM

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class CallItem(Body):
    """A call of a function by the assistant."""

    others = IN_RESPONSES_CALL_ITEM

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: Annotated[
        str | None, Field(description="name of the namespace that has the function")
    ] = None
    arguments: str


class OutputItem(Body):
    """The result of a call."""

    others = IN_RESPONSES_OUTPUT_ITEM

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningItem(Body):
    """Reasoning of the assistant. Its content is for chat templates that use it."""

    others = IN_RESPONSES_REASONING_ITEM

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field(default_factory=list)


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


Item = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a function_call")]
    | Annotated[OutputItem, Tag("a function_call_output")]
    | Annotated[ReasoningItem, Tag("a reasoning")],
    Discriminator(tag_of_kind(default="message")),
    BeforeValidator(check_kind(*_KINDS, default="message")),
]
Input = Annotated[
    Annotated[str, Tag(_TEXT)]
    | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag(_LIST)],
    Discriminator(_form),
]


class Conversation:
    """Messages of a chat, made of the items of an input.

    Reasoning, texts and calls of the assistant that follow one another are one message, so that
    the results of calls follow the message that has the calls. Two texts without a call between
    them are two messages.

    Attributes:
        messages: messages of a `ChatBody`.
        paths: paths of items by those of messages, for `FieldNames`.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: dict[str, str] = {}
        self._reasoning = ""  # of the next message of the assistant

    def add(self, item: Item, path: str) -> None:
        """Append an item whose path in the request is ``path``."""
        match item:
            case ReasoningItem():
                self._reasoning += "".join(part.text for part in item.content)
            case CallItem():
                self._add_call(item, path)
            case OutputItem():
                self._add_output(item, path)
            case MessageItem(role="assistant"):
                self._add_content(item, path)
            case MessageItem():
                self._begin(item.role, path, content=_content(item.content))

    @property
    def _last(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    def _begin(self, role: str, path: str, **fields: Any) -> None:
        message = {"role": role, **fields}
        if role == "assistant" and self._reasoning:
            message["reasoning_content"] = self._reasoning
        self._reasoning = ""  # that of a message that does not exist is dropped
        self.messages.append(message)
        self.paths[self._last] = path

    def _turn(self) -> dict[str, Any] | None:
        """Return the message of the assistant that the next item may continue."""
        if self._reasoning or not self.messages or self.messages[-1]["role"] != "assistant":
            return None
        return self.messages[-1]

    def _add_content(self, item: MessageItem, path: str) -> None:
        turn = self._turn()
        if turn is None or "tool_calls" not in turn:
            self._begin("assistant", path, content=_content(item.content))
        elif "content" not in turn:
            turn["content"] = _content(item.content)
            self.paths[f"{self._last}.content"] = f"{path}.content"
        else:
            turn["content"] = [*_parts(turn["content"]), *_parts(_content(item.content))]

    def _add_call(self, item: CallItem, path: str) -> None:
        if self._turn() is None:
            self._begin("assistant", path)
        calls = self.messages[-1].setdefault("tool_calls", [])
        name = chat_name(item.namespace, item.name)
        function = {"name": name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
        call = f"{self._last}.tool_calls[{len(calls) - 1}]"
        self.paths |= {call: path, f"{call}.function": path}
        self.paths.setdefault(f"{self._last}.tool_calls", path)

    def _add_output(self, item: OutputItem, path: str) -> None:
        self._begin("tool", path, tool_call_id=item.call_id, content=_content(item.output))
        self.paths[f"{self._last}.content"] = f"{path}.output"
        self.paths[f"{self._last}.tool_call_id"] = f"{path}.call_id"


def _content(content: Text) -> str | list[dict[str, str]]:
    """Return the content of a message of a chat. A single text is not a list for templates."""
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return content[0].text
    return [{"type": "text", "text": part.text} for part in content]


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
