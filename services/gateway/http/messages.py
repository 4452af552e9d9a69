"""Messages of the assistant in OpenAI's format, whole or as deltas of a stream."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from services.gateway.output.message_parser import MessageParser
from services.gateway.output.parts import CallArguments, CallStart, Content, Part, Reasoning


@dataclass(frozen=True)
class Messages:
    """Conversion of the outputs of a chat to messages.

    Attributes:
        new_parser: returns a parser for one choice.
        new_call_id: returns an id for a tool call.
    """

    new_parser: Callable[[], MessageParser]
    new_call_id: Callable[[], str]


class MessageStream:
    """The message of one choice, as deltas.

    A tool call begins with a delta that has its id and name. Fragments of its arguments follow.
    """

    def __init__(self, messages: Messages) -> None:
        self._parser = messages.new_parser()
        self._new_call_id = messages.new_call_id
        self._calls = 0

    def push(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Return the deltas for the next text of the output."""
        parts = self._parser.push(text)
        if is_last:
            parts.extend(self._parser.finish())
        return list(self._deltas(parts))

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason of the message, for that of the output."""
        return reason and self._parser.finish_reason(reason)

    def _deltas(self, parts: Iterable[Part]) -> Iterable[dict[str, Any]]:
        for part in parts:
            match part:
                case Content(text):
                    yield {"content": text}
                case Reasoning(text):
                    yield {"reasoning": text, "reasoning_content": text}
                case CallStart(name):
                    self._calls += 1
                    function = {"name": name, "arguments": ""}
                    call = {"id": self._new_call_id(), "type": "function", "function": function}
                    yield {"tool_calls": [{"index": self._calls - 1, **call}]}
                case CallArguments(text):
                    fragment = {"index": self._calls - 1, "function": {"arguments": text}}
                    yield {"tool_calls": [fragment]}


class WholeMessage:
    """The message of one choice, collected from the deltas of a stream."""

    def __init__(self, messages: Messages) -> None:
        self._stream = MessageStream(messages)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def add(self, text: str, *, is_last: bool) -> None:
        """Append the next text of the output."""
        for delta in self._stream.push(text, is_last=is_last):
            if "content" in delta:
                self._content.append(delta["content"])
            elif "reasoning" in delta:
                self._reasoning.append(delta["reasoning"])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    self._calls.append({name: call[name] for name in ("id", "type", "function")})
                    self._arguments.append([])
                self._arguments[-1].append(call["function"]["arguments"])

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason of the message, for that of the output."""
        return self._stream.finish_reason(reason)

    def as_json(self) -> dict[str, Any]:
        """Return the message. Its content is null if there is none beside calls or reasoning."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._reasoning:
            reasoning = "".join(self._reasoning)
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self._calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(arguments)}}
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        if not content and (self._reasoning or self._calls):
            message["content"] = None
        return message
