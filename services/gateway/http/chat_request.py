"""Requests of other interfaces in the form of chat completions."""

from dataclasses import dataclass, field
from typing import Any

from services.gateway.http.field_names import FieldNames
from services.gateway.http.schemas import ChatBody, validate


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion, made of the body of another interface.

    Attributes:
        names: names of the fields of ``body`` in the request of the client.
    """

    body: ChatBody
    names: FieldNames = field(default_factory=FieldNames)

    @classmethod
    def of(cls, content: dict[str, Any], names: FieldNames) -> "ChatRequest":
        """Return the chat completion with these fields.

        Raises:
            InvalidRequest: if a field is invalid or not supported; ``param`` is the client's name.
        """
        with names.in_errors():
            return cls(validate(ChatBody, content), names)
