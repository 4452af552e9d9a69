"""The answer of the Responses API: the response object, whole or as typed events."""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import InvalidRequest, ServiceError
from services.gateway.http.answer import Answer, Block, BlockKind, Change, Closed, Grown, Opened
from services.gateway.http.messages import Messages
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.responses_api.tools import offered_functions
from services.gateway.text import TextDelta

_ID_BYTES = 12
_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}
_TEXT_EVENTS = {BlockKind.TEXT: "output_text", BlockKind.REASONING: "reasoning_text"}
"""Names of the events with the text of a part, by the kind of its block."""


@dataclass(frozen=True)
class ResponsesFormat:
    """Format of one response.

    Attributes:
        id: id of the response.
        created: time of the request, seconds since 1970.
        model: name of the served model.
        messages: conversion of the output to a message; None if all of it is content.
    """

    body: ResponsesBody
    id: str
    created: int
    model: str
    prompt_tokens: int
    messages: Messages | None

    def events(self) -> "ResponseEvents":
        """Return the formatter of a response that is streamed."""
        return ResponseEvents(self)

    def whole(self) -> "WholeResponse":
        """Return the formatter of a response that is not streamed."""
        return WholeResponse(self)


class _Response:
    """The response object, while its output grows."""

    def __init__(self, format: ResponsesFormat) -> None:
        self.answer = Answer(format.messages)
        self._format = format
        self._ids: list[str] = []
        self._functions = {one.name: one for one in offered_functions(format.body.tools)}

    def push(self, deltas: Sequence[TextDelta]) -> Iterable[Change]:
        """Add output; yield how the blocks change. The caller must exhaust the iterator."""
        return self.answer.push(deltas)

    def id_of(self, block: Block) -> str:
        """Return the id of an item."""
        while len(self._ids) <= block.index:
            self._ids.append(secrets.token_hex(_ID_BYTES))
        return f"{_PREFIXES[block.kind]}_{self._ids[block.index]}"

    def item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        """Return an item of the output.

        Args:
            status: status of an item that is in progress, whose text is left out; None for others.
        """
        text = "" if status else block.text
        item: dict[str, Any] = {
            "id": self.id_of(block),
            "status": status or ("completed" if block.is_complete else "incomplete"),
        }
        parts = [] if status else [_part(block.kind, text)]
        match block.kind:
            case BlockKind.TEXT:
                return {**item, "type": "message", "role": "assistant", "content": parts}
            case BlockKind.REASONING:
                return {**item, "type": "reasoning", "summary": [], "content": parts}
            case BlockKind.CALL:
                called = self._functions[block.name]
                call = {"call_id": block.call_id, "name": called.function.name, "arguments": text}
                if called.namespace is not None:
                    call["namespace"] = called.namespace
                return {**item, "type": "function_call", **call}

    def as_json(self, error: ServiceError | None = None) -> dict[str, Any]:
        """Return the response object in its present state.

        Args:
            error: error that ended the output, if any.
        """
        answer, given = self.answer, self._format
        status = {None: "in_progress", "stop": "completed"}.get(answer.finish, "incomplete")
        if error is not None:
            status = "failed"
        is_cut = status == "incomplete"
        return {
            "id": given.id,
            "object": "response",
            "created_at": given.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error and _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": given.model,
            "output": [] if status == "in_progress" else [*map(self.item, answer.blocks)],
            "usage": None if answer.finish is None else self._usage(),
            **_echoed(given.body),
        }

    def _usage(self) -> dict[str, Any]:
        answer, prompt = self.answer, self._format.prompt_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": prompt + answer.output_tokens,
        }


class WholeResponse:
    """Collects the output of a response that is not streamed."""

    def __init__(self, format: ResponsesFormat) -> None:
        self._response = _Response(format)

    def add(self, deltas: Sequence[TextDelta]) -> None:
        """Append a batch of deltas."""
        for _ in self._response.push(deltas):
            pass

    def body(self) -> bytes:
        """Return the response body."""
        return orjson.dumps(self._response.as_json())


class ResponseEvents:
    """Formats the output of a response as typed events with consecutive numbers."""

    def __init__(self, format: ResponsesFormat) -> None:
        self._response = _Response(format)
        self._number = 0

    def write(self, deltas: Sequence[TextDelta]) -> bytes:
        """Return the events of a batch of deltas."""
        events = []
        if self._number == 0:
            response = self._response.as_json()
            events += [self._event(name, response=response) for name in ("created", "in_progress")]
        for change in self._response.push(deltas):
            events += self._changed(change)
        return b"".join(events)

    def finish(self) -> bytes:
        """Return the event with the complete response."""
        response = self._response.as_json()
        return self._event(response["status"], response=response)

    def fail(self, error: ServiceError) -> bytes:
        """Return the event with the response that failed."""
        return self._event("failed", response=self._response.as_json(error))

    def _changed(self, change: Change) -> Iterable[bytes]:
        block = change.block
        item = {"item_id": self._response.id_of(block), "output_index": block.index}
        if block.kind is BlockKind.CALL:
            name, where = "function_call_arguments", item
        else:
            name, where = _TEXT_EVENTS[block.kind], {**item, "content_index": 0}
        match change:
            case Opened():
                added = self._response.item(block, "in_progress")
                yield self._event("output_item.added", output_index=block.index, item=added)
                if block.kind is not BlockKind.CALL:
                    yield self._event("content_part.added", **where, part=_part(block.kind, ""))
            case Grown(text=text):
                yield self._event(f"{name}.delta", **where, delta=text, **_logprobs(block.kind))
            case Closed():
                yield from self._closed(block, name, where)

    def _closed(self, block: Block, name: str, where: dict[str, Any]) -> Iterable[bytes]:
        text = block.text
        if block.kind is BlockKind.CALL:
            yield self._event(f"{name}.done", **where, arguments=text)
        else:
            yield self._event(f"{name}.done", **where, text=text, **_logprobs(block.kind))
            yield self._event("content_part.done", **where, part=_part(block.kind, text))
        item = self._response.item(block)
        yield self._event("output_item.done", output_index=block.index, item=item)

    def _event(self, name: str, **content: Any) -> bytes:
        kind = f"response.{name}"
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **content})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _part(kind: BlockKind, text: str) -> dict[str, Any]:
    """Return a part of the content of an item."""
    if kind is BlockKind.TEXT:
        return {"type": "output_text", "text": text, "annotations": [], **_logprobs(kind)}
    return {"type": "reasoning_text", "text": text}


def _logprobs(kind: BlockKind) -> dict[str, list[Any]]:
    """Return the field with log probabilities of a text, which are not supported."""
    return {"logprobs": []} if kind is BlockKind.TEXT else {}


def _error(error: ServiceError) -> dict[str, str]:
    code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
    return {"code": code, "message": error.message}


def _echoed(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a response object that repeat the request, or defaults."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": body.text.format.as_json()},
        "tool_choice": body.tool_choice,
        "tools": [tool.model_dump() for tool in body.tools],
        "top_p": body.top_p,
        "truncation": "disabled",
    }
