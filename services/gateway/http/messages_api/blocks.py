"""Messages of a conversation, and their conversion to messages of a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from services.gateway.http.body_model import Body, check_kind, invalid, tag_of_kind
from services.gateway.http.other_fields import IN_MESSAGES_BLOCK

_STRING, _LIST = "a text", "a list"
"""Names of the forms of a content. They are no identifiers, so that error paths omit them."""


def _form(content: Any) -> str:
    return _STRING if isinstance(content, str) else _LIST


class TextBlock(Body):
    """A text."""

    others = IN_MESSAGES_BLOCK

    type: Literal["text"]
    text: str


Text = Annotated[
    Annotated[str, Tag(_STRING)]
    | Annotated[
        list[Annotated[TextBlock, BeforeValidator(check_kind("text"))]],
        Field(fail_fast=True),
        Tag(_LIST),
    ],
    Discriminator(_form),
]


class ThinkingBlock(Body):
    """Reasoning of the assistant, for chat templates that use it."""

    others = IN_MESSAGES_BLOCK

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Body):
    """A call of a tool by the assistant."""

    others = IN_MESSAGES_BLOCK

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """The result of a call."""

    others = IN_MESSAGES_BLOCK

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""


_KINDS = ("text", "thinking", "tool_use", "tool_result")


Block = Annotated[
    Annotated[TextBlock, Tag("a text")]
    | Annotated[ThinkingBlock, Tag("a thinking")]
    | Annotated[ToolUseBlock, Tag("a tool_use")]
    | Annotated[ToolResultBlock, Tag("a tool_result")],
    Discriminator(tag_of_kind()),
    BeforeValidator(check_kind(*_KINDS)),
]


_ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""Types of blocks in messages of each role."""


class InputMessage(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag(_STRING)] | Annotated[list[Block], Field(fail_fast=True), Tag(_LIST)],
        Discriminator(_form),
    ]

    @model_validator(mode="after")
    def _check_blocks(self) -> "InputMessage":
        allowed = _ALLOWED[self.role]
        for block in self.blocks:
            if block.type not in allowed:
                raise invalid("content", f"has a {block.type} in a message of the {self.role}")
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content

    @property
    def is_prefill(self) -> bool:
        """Whether the model continues the message, if it is the last one."""
        return self.role == "assistant" and all(b.type != "tool_use" for b in self.blocks)


_ACCOUNTING = "x-anthropic-billing-header:"
"""Beginning of a block that Claude Code puts before its instructions.

It differs in each request, so that no prompt would begin like an earlier one.
"""


class Conversation:
    """Messages of a chat, made of those of a request.

    Attributes:
        messages: messages of a `ChatBody`.
        paths: paths of messages and blocks by those of ``messages``, for `FieldNames`.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: dict[str, str] = {}

    def add_system(self, system: Text) -> None:
        """Append the message of the system, without the blocks for Anthropic's accounting."""
        texts = [system] if isinstance(system, str) else [block.text for block in system]
        kept = [text for text in texts if not text.startswith(_ACCOUNTING)]
        if kept or not texts:
            self._append("system", "system", content=_content(kept))

    def add(self, message: InputMessage, path: str) -> None:
        """Append a message whose path in the request is ``path``."""
        if message.role == "assistant":
            self._add_assistant(message, path)
        else:
            self._add_results_and_texts(message, path)

    def _append(self, role: str, path: str, **fields: Any) -> str:
        """Append a message to the chat; return its path there."""
        self.messages.append({"role": role, **fields})
        own = f"messages[{len(self.messages) - 1}]"
        self.paths[own] = path
        return own

    def _add_assistant(self, message: InputMessage, path: str) -> None:
        fields: dict[str, Any] = {}
        texts, thoughts, calls = [], [], []
        for at, block in enumerate(message.blocks):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    calls.append((f"{path}.content[{at}]", block))
        if texts or not calls:
            fields["content"] = _content(texts)
        if thoughts:
            fields["reasoning_content"] = "".join(thoughts)
        if calls:
            fields["tool_calls"] = [_call(block) for _, block in calls]
        own = self._append("assistant", path, **fields)
        for at, (place, _) in enumerate(calls):
            call = f"{own}.tool_calls[{at}]"
            self.paths |= {call: place, f"{call}.function": place}
            self.paths[f"{call}.function.arguments"] = f"{place}.input"
        if calls:
            self.paths[f"{own}.tool_calls"] = calls[0][0]

    def _add_results_and_texts(self, message: InputMessage, path: str) -> None:
        """Append a message for each result of a call, and for the texts between them."""
        texts: list[str] = []
        for at, block in enumerate(message.blocks):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    self._append(message.role, path, content=_content(texts))
                    texts = []
                place, content = f"{path}.content[{at}]", block.content
                given = [content] if isinstance(content, str) else [b.text for b in content]
                self._append("tool", place, tool_call_id=block.tool_use_id, content=_content(given))
        if texts or not message.blocks:
            self._append(message.role, path, content=_content(texts))


def _call(block: ToolUseBlock) -> dict[str, Any]:
    """Return a call of a message of a chat."""
    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return the content of a message of a chat. A single text is not a list for templates."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
