"""Interfaces of workloads and tokenizers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Protocol, TypeAlias

from loadgen.errors import UsageError


class Role(StrEnum):
    """Author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


Text: TypeAlias = str | tuple[int, ...]
"""Text, or token ids of the target's vocabulary."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: Role
    content: Text


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Prompt of a turn of a chat: all messages until this turn.

    Attributes:
        messages: messages in their order; the last one is the user's. All are texts, or all are
            token ids without special tokens.
        salt: unique beginning, sent before the first message; empty for none.
        lead: special tokens before token ids.
    """

    messages: tuple[Message, ...]
    salt: Text = ""
    lead: tuple[int, ...] = ()

    @property
    def texts(self) -> list[tuple[Role, str]]:
        """Roles and texts of the messages, with the salt at the beginning of the first one.

        Raises:
            UsageError: if the messages are token ids.
        """
        found = [(one.role, one.content) for one in self.messages if isinstance(one.content, str)]
        if len(found) < len(self.messages):
            raise UsageError("chat requests cannot have prompts of token ids")
        if isinstance(self.salt, str):
            (role, text), *_ = found
            found[0] = role, _spaced(self.salt, text)
        return found

    @property
    def joined(self) -> Text:
        """The messages as one prompt, for endpoints without messages.

        An answer follows the text before it unchanged, as it was generated, so that a tokenizer can
        produce the tokens of the previous turn again. Other messages follow a space.
        """
        contents = [self.salt, *(message.content for message in self.messages)]
        if ids := [one for one in contents if isinstance(one, tuple)]:
            return (*self.lead, *chain.from_iterable(ids))
        text = ""
        for role, part in self.texts:
            text = text + part if role is Role.ASSISTANT else _spaced(text, part)
        return text

    def continued(self, answer: Text, turn: "Turn") -> "Dialogue":
        """Return the prompt of the next turn, given the answer to this one."""
        more = (Message(Role.ASSISTANT, answer), Message(Role.USER, turn.message))
        return replace(self, messages=(*self.messages, *more), salt=turn.salt)


@dataclass(frozen=True, slots=True)
class Turn:
    """Later turn of a chat. Its request is known when the turn before it has been answered.

    Attributes:
        message: user message; token ids lack special tokens.
        input_tokens: number of tokens of the message.
        output_tokens: number of output tokens to request as ``max_tokens``.
        think_s: seconds from the end of the previous answer to the send.
        salt: beginning of the prompt, which replaces the salt of the previous turn; empty for none.
    """

    message: Text
    input_tokens: int
    output_tokens: int
    think_s: float = 0.0
    salt: Text = ""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """Content of one request, without its send time.

    Attributes:
        prompt: text, token ids of the target's vocabulary, or the messages of a chat.
        input_tokens: number of prompt tokens as counted by the target's tokenizer.
        output_tokens: number of output tokens to request as ``max_tokens``.
        at: send time in a trace, in seconds after its start; None if the source has no times.
        later: later turns of the chat to which the request belongs; None if it belongs to none.
    """

    prompt: Text | Dialogue
    input_tokens: int
    output_tokens: int
    at: float | None = None
    later: tuple[Turn, ...] | None = None


class Workload(Protocol):
    """Source of requests, reproducible by seed."""

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield requests, and the first ones of chats.

        The sequence is endless unless the source is finite.
        """
        ...


class Tokenizer(Protocol):
    """Tokenizer of the target's model."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


def _spaced(first: str, second: str) -> str:
    return f"{first} {second}" if first and second else first or second
