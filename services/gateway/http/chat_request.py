"""Requests of other interfaces in the form of chat completions."""

from dataclasses import dataclass, field, replace
from typing import Any

from services.gateway.chats import ChatOptions
from services.gateway.http.field_names import FieldNames
from services.gateway.http.schemas import ChatBody, validate


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion, made of the body of another interface.

    Attributes:
        names: names of the fields of ``body`` in the request of the client.
        thinking, requires_effort: see `ChatOptions`.
    """

    body: ChatBody
    names: FieldNames = field(default_factory=FieldNames)
    thinking: bool | None = None
    requires_effort: bool = True

    @classmethod
    def of(
        cls,
        content: dict[str, Any],
        names: FieldNames,
        *,
        thinking: bool | None = None,
        requires_effort: bool = True,
    ) -> "ChatRequest":
        """Return the chat completion with these fields.

        Raises:
            InvalidRequest: if a field is invalid or not supported; ``param`` is the client's name.
        """
        with names.in_errors():
            body = validate(ChatBody, content)
        return cls(body, names, thinking, requires_effort)

    def conversation(self) -> ChatOptions:
        """Return the options of the conversation and of its next message."""
        return replace(
            self.body.conversation(), thinking=self.thinking, requires_effort=self.requires_effort
        )
