"""The answer of the Messages API: the message, whole or as events."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import ServiceError
from services.gateway.http.answer import Answer, Block, BlockKind, Change, Closed, Grown, Opened
from services.gateway.http.call_arguments import parse_arguments
from services.gateway.http.messages import Messages
from services.gateway.http.messages_api.errors import error_content, error_message
from services.gateway.text import TextDelta


@dataclass(frozen=True)
class MessagesFormat:
    """Format of one answer.

    Attributes:
        request_id: id of the request, which errors have.
        model: name of the served model.
        messages: conversion of the output to a message; None if all of it is content.
    """

    request_id: str
    model: str
    prompt_tokens: int
    messages: Messages | None

    def events(self) -> "MessageEvents":
        """Return the formatter of an answer that is streamed."""
        return MessageEvents(self)

    def whole(self) -> "WholeAnswer":
        """Return the formatter of an answer that is not streamed."""
        return WholeAnswer(self)

    def message(self, answer: Answer, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the message with this content."""
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop_fields(answer),
            "usage": self.usage(answer),
        }

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Return the token counts. Input tokens are those that were not cached."""
        return {
            "input_tokens": self.prompt_tokens - answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.cached_tokens,
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
        }


class WholeAnswer:
    """Collects the output of an answer that is not streamed."""

    def __init__(self, format: MessagesFormat) -> None:
        self._format = format
        self._answer = Answer(format.messages)

    def add(self, deltas: Sequence[TextDelta]) -> None:
        """Append a batch of deltas."""
        for _ in self._answer.push(deltas):
            pass

    def body(self) -> bytes:
        """Return the response body."""
        content = [_block(block) for block in self._answer.blocks]
        return orjson.dumps(self._format.message(self._answer, content))


class MessageEvents:
    """Formats the output of an answer as events."""

    def __init__(self, format: MessagesFormat) -> None:
        self._format = format
        self._answer = Answer(format.messages)
        self._started = False

    def write(self, deltas: Sequence[TextDelta]) -> bytes:
        """Return the events of a batch of deltas."""
        changes = list(self._answer.push(deltas))
        events = []
        if not self._started:
            self._started = True
            # The number of cached tokens comes with the first output, whose count comes at the end.
            start = {**self._format.message(self._answer, []), **stop_fields(None)}
            start["usage"] |= {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
            events += [_event("message_start", message=start), _event("ping")]
        events += map(_change_event, changes)
        return b"".join(events)

    def finish(self) -> bytes:
        """Return the events that end the message."""
        usage = self._format.usage(self._answer)
        end = _event("message_delta", delta=stop_fields(self._answer), usage=usage)
        return end + _event("message_stop")

    def fail(self, error: ServiceError) -> bytes:
        """Return the event with an error, which is the last one."""
        content = error_content(error_message(error), error.status, self._format.request_id)
        return b"event: error\ndata: " + orjson.dumps(content) + b"\n\n"


def stop_fields(answer: Answer | None) -> dict[str, str | None]:
    """Return why the answer ended; None for an answer that goes on."""
    reason, text = None, None
    if answer is not None and answer.finish is not None:
        if answer.finish == "length":
            reason = "max_tokens"
        elif answer.calls_tools:
            reason = "tool_use"
        elif (text := answer.stop_string) is not None:
            reason = "stop_sequence"
        else:
            reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": text}


def _block(block: Block, *, is_empty: bool = False) -> dict[str, Any]:
    """Return a block of the content, or the block with which its events begin."""
    text = "" if is_empty else block.text
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case BlockKind.CALL:
            call = {"type": "tool_use", "id": block.call_id, "name": block.name}
            return {**call, "input": {} if is_empty else parse_arguments(text)}


def _change_event(change: Change) -> bytes:
    index = change.block.index
    match change:
        case Opened(block):
            block_start = _block(block, is_empty=True)
            return _event("content_block_start", index=index, content_block=block_start)
        case Grown(block, text):
            return _event("content_block_delta", index=index, delta=_delta(block.kind, text))
        case Closed():
            return _event("content_block_stop", index=index)


def _delta(kind: BlockKind, text: str) -> dict[str, str]:
    match kind:
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _event(name: str, **content: Any) -> bytes:
    data = orjson.dumps({"type": name, **content})
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
