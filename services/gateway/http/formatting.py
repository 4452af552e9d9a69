"""Text deltas in OpenAI's response format: whole responses, and server-sent events.

Most parts of an event are the same throughout a stream and are encoded once. For an event without
log probabilities and token ids, only the text is encoded anew.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.v1 import sampling_pb2
from services.common.errors import ServiceError
from services.gateway.http.messages import Messages, MessageStream, WholeMessage
from services.gateway.http.prompt_parts import PromptFields, PromptParts
from services.gateway.http.token_text import finite, token_text
from services.gateway.text import FINISH_REASONS, TextDelta
from services.tokenizer.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ResponseInfo:
    """The parts of a response that do not depend on the generated text.

    Attributes:
        prompts: token ids of the prompt of each choice, in a response that has token ids; None in
            others.
        messages: conversion of outputs to messages; None if each output is a content.
        prompt_fields: other fields that depend on the prompts; None for none.
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
    prompt_fields: PromptFields | None = None

    def prompt_parts(self) -> list[PromptParts]:
        """Return the parts of the response that each prompt has; empty for none."""
        fields = self.prompt_fields
        if fields is None:
            return []
        return [PromptParts(fields, prompt, self.tokenizer) for prompt in fields.prompts]


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
        self._echo = _Echo(info)
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
            if delta.scored:
                self._cached_tokens += delta.cached_tokens
                events += self._echoed(delta)
                continue
            events += self._echoed(delta)
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

    def _echoed(self, delta: TextDelta) -> list[bytes]:
        """Return events with the prompt tokens that can be sent before a delta."""
        events = []
        for choice, text, logprobs in self._echo.before(delta):
            ids = self._token_ids(TextDelta(choice))
            events.append(self._full(choice, {"text": text, **ids}, logprobs))
        return events

    def finish(self) -> bytes:
        """Return the usage event if it was requested, and the end marker."""
        if not self._info.include_usage:
            return DONE
        return format_event({**self._envelope, "choices": [], "usage": self._usage()}) + DONE

    def fail(self, error: ServiceError) -> bytes:
        """Return the event with an error, which is the last one."""
        return format_event(error.body())

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
            offsets = self._echo.shifted(delta.choice, delta.offsets)
            logprobs = format_logprobs(self._info, delta.tokens, offsets)
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


class _Echo:
    """Prompts that are sent before the output of their choices. Nothing without ``echo``."""

    def __init__(self, info: ResponseInfo) -> None:
        fields = info.prompt_fields
        self._parts = info.prompt_parts() if fields and fields.echo else []
        self._choices = fields.choices if fields else 1
        self._sent: Counter[int] = Counter()

    def before(self, delta: TextDelta) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
        """Yield choice, text and ``logprobs`` of the prompt tokens to send before a delta."""
        if not self._parts:
            return
        number = delta.choice // self._choices
        parts = self._parts[number]
        for piece in delta.scored:
            parts.take(piece)
        first = number * self._choices
        choices = range(first, first + self._choices) if delta.scored else (delta.choice,)
        for choice in choices:
            sent, self._sent[choice] = self._sent[choice], parts.ready
            if sent < parts.ready:
                yield choice, *parts.part(sent, parts.ready)

    def shifted(self, choice: int, offsets: Sequence[int]) -> Sequence[int]:
        """Return offsets of output tokens in the text with the prompt."""
        if not self._parts:
            return offsets
        length = len(self._parts[choice // self._choices].text)
        return [length + offset for offset in offsets]


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
        self._prompts = info.prompt_parts()
        self._cached_tokens = 0

    def add(self, deltas: Sequence[TextDelta]) -> None:
        """Append a batch of deltas."""
        for delta in deltas:
            output = self._choices[delta.choice]
            for piece in delta.scored:
                self._prompt_of(delta.choice).take(piece)
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
        if info.chat and self._prompts and self._prompts[0].scores is not None:
            content["prompt_logprobs"] = self._prompts[0].scores
        return orjson.dumps(content)

    def _prompt_of(self, choice: int) -> PromptParts:
        assert self._info.prompt_fields is not None
        return self._prompts[choice // self._info.prompt_fields.choices]

    def _choice(self, index: int, output: _ChoiceOutput) -> dict[str, Any]:
        info = self._info
        text, finish, offsets = "".join(output.text), output.finish, output.offsets
        if self._prompts and not info.chat:
            prompt = self._prompt_of(index)
            text = prompt.text + text
            offsets = [len(prompt.text) + offset for offset in offsets]
        content: dict[str, Any] = {"text": text}
        if info.chat:
            content = {"message": {"role": "assistant", "content": text}}
        if output.message is not None:
            content = {"message": output.message.as_json()}
            finish = output.message.finish_reason(finish)
        logprobs = None
        if info.with_logprobs:
            logprobs = format_logprobs(info, output.tokens, offsets)
        if self._prompts and not info.chat:
            logprobs = self._with_prompt(self._prompt_of(index), content, logprobs)
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

    def _with_prompt(
        self, prompt: PromptParts, content: dict[str, Any], logprobs: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Add the log probabilities of a prompt to a completion.

        Return ``logprobs`` of prompt and output.
        """
        fields = self._info.prompt_fields
        if prompt.scores is not None:
            content["prompt_logprobs"] = prompt.scores
        if fields is None or not fields.echo or logprobs is None:
            return logprobs
        _, echoed = prompt.part(0, prompt.ready)
        assert echoed is not None
        return {name: [*values, *logprobs[name]] for name, values in echoed.items()}


@dataclass(frozen=True)
class CompletionFormat:
    """Format of completions and chat completions.

    Attributes:
        choices: number of choices, over all prompts.
    """

    info: ResponseInfo
    choices: int

    def events(self) -> EventWriter:
        """Return the formatter of a response that is streamed."""
        return EventWriter(self.info)

    def whole(self) -> ResponseBuilder:
        """Return the formatter of a response that is not streamed."""
        return ResponseBuilder(self.info, self.choices)


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
        "tokens": [token_text(pieces, token.token) for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [_top_logprobs(pieces, token) for token in tokens],
        "text_offset": offsets,
    }


def _top_logprobs(pieces: Sequence[bytes], token: sampling_pb2.Token) -> dict[str, float]:
    """Return the most likely tokens. As in OpenAI's API, the sampled token is always included."""
    top = {token_text(pieces, t.token): finite(t.logprob) for t in token.top}
    top[token_text(pieces, token.token)] = finite(token.logprob)
    return top


def _entry(pieces: Sequence[bytes], token: int, logprob: float) -> dict[str, Any]:
    piece = pieces[token] if token < len(pieces) else b""
    return {
        "token": piece.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(piece),
    }
