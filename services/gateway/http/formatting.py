"""Text deltas in OpenAI's response format: whole responses, and server-sent events.

Most parts of an event are the same throughout a stream and are encoded once. For an event without
log probabilities and token ids, only the text is encoded anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.v1 import sampling_pb2
from services.gateway.http.messages import Messages, MessageStream, WholeMessage
from services.gateway.text import FINISH_REASONS, TextDelta
from services.tokenizer.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

_MIN_LOGPROB = -9999.0
"""Lowest log probability in a response, in place of minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class ResponseInfo:
    """The parts of a response that do not depend on the generated text.

    Attributes:
        prompts: token ids of the prompt of each choice, in a response that has token ids; None in
            others.
        messages: conversion of outputs to messages; None if each output is a content.
    """

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    prompt_tokens: int
    chat: bool
    with_logprobs: bool
    include_usage: bool = False
    continuous_usage: bool = False
    prompts: tuple[tuple[int, ...], ...] | None = None
    messages: Messages | None = None


def format_event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def format_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class EventWriter:
    """Formats the text deltas of one stream as events.

    With `ResponseInfo.continuous_usage`, each event has the usage of the request so far. With
    `ResponseInfo.prompts`, the first event of each choice has the token ids of its prompt, and each
    event those of its output, also if they have no text yet.
    """

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._has_details = info.with_logprobs or info.prompts is not None
        self._completion_tokens = self._cached_tokens = 0
        self._started: set[int] = set()
        self._messages: dict[int, MessageStream] = {}
        self._envelope = {
            "id": info.id,
            "object": "chat.completion.chunk" if info.chat else "text_completion",
            "created": info.created,
            "model": info.model,
        }
        self._head = b"data: " + orjson.dumps(self._envelope)[:-1] + b',"choices":[{"index":'
        self._before_text = b',"delta":{"content":' if info.chat else b',"text":'
        self._after_text = b',"logprobs":null,"finish_reason":null}]'
        if info.chat:
            self._after_text = b"}" + self._after_text
        self._end = b',"usage":null}\n\n' if info.include_usage else b"}\n\n"

    def write(self, deltas: Sequence[TextDelta]) -> bytes:
        """Return the events of a batch of deltas; empty if there is nothing to send yet."""
        events = []
        for delta in deltas:
            if self._info.chat and delta.choice not in self._started:
                self._started.add(delta.choice)
                events.append(self._greeting(delta.choice))
            self._completion_tokens += len(delta.tokens)
            self._cached_tokens += delta.cached_tokens
            if self._info.continuous_usage:
                self._end = b',"usage":' + orjson.dumps(self._usage()) + b"}\n\n"
            if delta.finish or self._has_details or self._info.messages:
                events.extend(self._detailed(delta))
            elif delta.text:
                events.append(
                    self._head
                    + b"%d" % delta.choice
                    + self._before_text
                    + orjson.dumps(delta.text)
                    + self._after_text
                    + self._end
                )
        return b"".join(events)

    def finish(self) -> bytes:
        """Return the usage event if it was requested, and the end marker."""
        if not self._info.include_usage:
            return DONE
        return format_event({**self._envelope, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> dict[str, Any]:
        return format_usage(self._info.prompt_tokens, self._completion_tokens, self._cached_tokens)

    def _greeting(self, choice: int) -> bytes:
        """Return the first event of a choice of a chat, which has no output."""
        prompts = self._info.prompts
        prompt = None if prompts is None else prompts[choice]
        content = {"delta": {"role": "assistant", "content": ""}}
        return self._full(choice, content, prompt=prompt)

    def _detailed(self, delta: TextDelta) -> list[bytes]:
        logprobs = None
        if self._info.with_logprobs and delta.tokens:
            logprobs = format_logprobs(self._info, delta.tokens, delta.offsets)
        reason = FINISH_REASONS.get(delta.finish)
        ids = self._token_ids(delta)
        if not self._info.chat:
            return [self._full(delta.choice, {"text": delta.text, **ids}, logprobs, reason)]
        contents, reason = self._contents(delta, reason)
        if not contents and (logprobs or (ids and delta.tokens and not reason)):
            contents = [{}] if self._info.messages else [{"content": ""}]
        events = []
        for content in contents:  # the first one has the details
            events.append(self._full(delta.choice, {"delta": content, **ids}, logprobs))
            ids, logprobs = ids and {"token_ids": []}, None
        if reason:
            events.append(self._full(delta.choice, {"delta": {}, **ids}, None, reason))
        return events

    def _contents(
        self, delta: TextDelta, reason: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return the deltas of a message for a text, and its finish reason."""
        if self._info.messages is None:
            return [{"content": delta.text}] if delta.text else [], reason
        if delta.choice not in self._messages:
            self._messages[delta.choice] = MessageStream(self._info.messages)
        message = self._messages[delta.choice]
        contents = message.push(delta.text, is_last=bool(delta.finish))
        return contents, message.finish_reason(reason)

    def _token_ids(self, delta: TextDelta) -> dict[str, Any]:
        """Return the fields of a choice that have token ids; none if they were not requested.

        Completions have those of the prompt here: in the first event of a choice, then null.
        """
        prompts = self._info.prompts
        if prompts is None:
            return {}
        ids = {"token_ids": [token.token for token in delta.tokens]}
        if self._info.chat:
            return ids
        first = delta.choice not in self._started
        self._started.add(delta.choice)
        return {"prompt_token_ids": prompts[delta.choice] if first else None, **ids}

    def _full(
        self,
        choice: int,
        content: dict[str, Any],
        logprobs: Any = None,
        reason: str | None = None,
        prompt: tuple[int, ...] | None = None,
    ) -> bytes:
        """Return an event with one choice.

        Args:
            content: fields of the choice beside its index, logprobs and finish reason.
            prompt: token ids of the prompt, for the top level of the event; None for none.
        """
        entry = {"index": choice, **content, "logprobs": logprobs, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._envelope, "choices": [entry]}
        if prompt is not None:
            chunk["prompt_token_ids"] = prompt
        if self._info.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._info.include_usage:
            chunk["usage"] = None
        return format_event(chunk)


@dataclass
class _ChoiceOutput:
    text: list[str] = field(default_factory=list)
    tokens: list[sampling_pb2.Token] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: str | None = None
    message: WholeMessage | None = None


class ResponseBuilder:
    """Collects the output of a response that is not streamed."""

    def __init__(self, info: ResponseInfo, choices: int) -> None:
        self._info = info
        self._choices = [
            _ChoiceOutput(message=WholeMessage(info.messages) if info.messages else None)
            for _ in range(choices)
        ]
        self._cached_tokens = 0

    def add(self, deltas: Sequence[TextDelta]) -> None:
        """Append a batch of deltas."""
        for delta in deltas:
            output = self._choices[delta.choice]
            self._cached_tokens += delta.cached_tokens
            if output.message is None:
                output.text.append(delta.text)
            else:
                output.message.add(delta.text, is_last=bool(delta.finish))
            output.tokens.extend(delta.tokens)
            output.offsets.extend(delta.offsets)
            if delta.finish:
                output.finish = FINISH_REASONS[delta.finish]

    def body(self) -> bytes:
        """Return the response body."""
        info = self._info
        count = sum(len(output.tokens) for output in self._choices)
        content: dict[str, Any] = {
            "id": info.id,
            "object": "chat.completion" if info.chat else "text_completion",
            "created": info.created,
            "model": info.model,
            "choices": [self._choice(i, c) for i, c in enumerate(self._choices)],
            "usage": format_usage(info.prompt_tokens, count, self._cached_tokens),
        }
        if info.chat and info.prompts is not None:
            content["prompt_token_ids"] = info.prompts[0]
        return orjson.dumps(content)

    def _choice(self, index: int, output: _ChoiceOutput) -> dict[str, Any]:
        info = self._info
        text, finish = "".join(output.text), output.finish
        content: dict[str, Any] = {"text": text}
        if info.chat:
            content = {"message": {"role": "assistant", "content": text}}
        if output.message is not None:
            content = {"message": output.message.as_json()}
            finish = output.message.finish_reason(finish)
        logprobs = None
        if info.with_logprobs:
            logprobs = format_logprobs(info, output.tokens, output.offsets)
        ids: dict[str, Any] = {}
        if info.prompts is not None:
            ids["token_ids"] = [token.token for token in output.tokens]
            if not info.chat:
                ids["prompt_token_ids"] = info.prompts[index]
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": finish,
            **ids,
        }


def format_logprobs(
    info: ResponseInfo, tokens: Sequence[sampling_pb2.Token], offsets: Sequence[int]
) -> dict[str, Any]:
    """Return log probabilities in the format of chat completions or of completions.

    Args:
        offsets: position of each token in the text of the choice, see `TextDelta`.
    """
    pieces = info.tokenizer.pieces
    if info.chat:
        return {
            "content": [
                {
                    **_entry(pieces, token.token, token.logprob),
                    "top_logprobs": [_entry(pieces, t.token, t.logprob) for t in token.top],
                }
                for token in tokens
            ]
        }
    return {
        "tokens": [_token_text(pieces, token.token) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top_logprobs(pieces, token) for token in tokens],
        "text_offset": offsets,
    }


def _top_logprobs(pieces: Sequence[bytes], token: sampling_pb2.Token) -> dict[str, float]:
    """Return the most likely tokens. As in OpenAI's API, the sampled token is always included."""
    top = {_token_text(pieces, t.token): _finite(t.logprob) for t in token.top}
    top[_token_text(pieces, token.token)] = _finite(token.logprob)
    return top


def _entry(pieces: Sequence[bytes], token: int, logprob: float) -> dict[str, Any]:
    piece = pieces[token] if token < len(pieces) else b""
    return {
        "token": piece.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(piece),
    }


def _token_text(pieces: Sequence[bytes], token: int) -> str:
    """Return a token as text, or its escaped bytes if they are not valid UTF-8."""
    piece = pieces[token] if token < len(pieces) else b""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
