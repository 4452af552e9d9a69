"""Errors of requests that are invalid or do not fit the model."""

from collections.abc import Sequence

from pydantic_core import ErrorDetails

from services.common.errors import InvalidRequest

_MAX_NAME_CHARS = 128
"""Maximum characters of a field name in an error message."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt and the requested output do not fit the context length of the model.

    Clients recognize the error, for example to shorten a conversation, by its code or by OpenAI's
    wording, which the message uses.

    Args:
        context_length: context length of the model, tokens.
        requested: what the client requested, such as "9 tokens (8 in the prompt, 1 in …)".
        prompt_tokens: tokens of the prompt, at least.
        max_tokens: maximum output tokens that were requested.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        context_length: int,
        requested: str,
        *,
        param: str,
        prompt_tokens: int,
        max_tokens: int = 0,
    ) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens. However, you "
            f"requested {requested}. Please reduce the length of the prompt or completion.",
            param=param,
        )
        self.context_length = context_length
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


def check_message_count(count: int, context_length: int | None, param: str = "messages") -> None:
    """Raise `ContextLengthExceeded` if a chat has more messages than the context has tokens.

    Args:
        param: name of the field with the messages.
    """
    if context_length is not None and count > context_length:
        raise ContextLengthExceeded(
            context_length,
            f"at least {count} tokens ({count} messages)",
            param=param,
            prompt_tokens=count,
        )


class UnsupportedField(InvalidRequest):
    """A field of OpenAI's API that this service does not support."""

    code = "unsupported_parameter"


def invalid_field(error: ErrorDetails) -> InvalidRequest:
    """Convert a pydantic error. ``param`` is a path such as ``messages[0].content``."""
    param = field_path(error["loc"])
    return InvalidRequest(f"{param}: {error['msg'].removeprefix('Value error, ')}", param=param)


def field_path(location: Sequence[int | str]) -> str:
    """Return the path of an invalid field, without pydantic's names of union members."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}" if path else step
    return (path or str(location[0]) if location else "body")[:_MAX_NAME_CHARS]
