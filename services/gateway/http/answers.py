"""OpenAI's answers, from pieces: whole ones, and the events of a stream.

A token's event is put together from bytes that were encoded once for its stream, with the text
alone encoded anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.v1 import sampling_pb2
from services.common.tokenizer import Tokenizer
from services.gateway.text import FINISH_REASONS, Piece

DONE = b"data: [DONE]\n\n"

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class AnswerShape:
    """What an answer needs beside its pieces."""

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    chat: bool
    with_logprobs: bool
    include_usage: bool = False


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class EventWriter:
    """Turns the pieces of one stream into events."""

    def __init__(self, shape: AnswerShape, prompt_tokens: int) -> None:
        self._shape = shape
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._offsets: dict[int, int] = {}
        self._greeted: set[int] = set()
        envelope = {
            "id": shape.id,
            "object": "chat.completion.chunk" if shape.chat else "text_completion",
            "created": shape.created,
            "model": shape.model,
        }
        self._envelope = envelope
        self._head = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":[{"index":'
        before = b',"delta":{"content":' if shape.chat else b',"text":'
        after = b"}" if shape.chat else b""
        end = b',"usage":null}\n\n' if shape.include_usage else b"}\n\n"
        self._before_text = before
        self._after_text = after + b',"logprobs":null,"finish_reason":null}]' + end

    def write(self, pieces: Sequence[Piece]) -> bytes:
        """The events of a batch of pieces; none for text that is still held back."""
        events = []
        for piece in pieces:
            self._completion_tokens += len(piece.tokens)
            if self._shape.chat and piece.choice not in self._greeted:
                self._greeted.add(piece.choice)
                events.append(self._full(piece.choice, {"role": "assistant", "content": ""}))
            if piece.finish or self._shape.with_logprobs:
                events.extend(self._detailed(piece))
            elif piece.text:
                events.append(
                    self._head
                    + b"%d" % piece.choice
                    + self._before_text
                    + orjson.dumps(piece.text)
                    + self._after_text
                )
        return b"".join(events)

    def finish(self) -> bytes:
        """What follows the last piece."""
        if not self._shape.include_usage:
            return DONE
        counted = usage(self._prompt_tokens, self._completion_tokens)
        return event({**self._envelope, "choices": [], "usage": counted}) + DONE

    def _detailed(self, piece: Piece) -> list[bytes]:
        logprobs = None
        if self._shape.with_logprobs and piece.tokens:
            offset = self._offsets.get(piece.choice, 0)
            logprobs = format_logprobs(self._shape, piece.tokens, offset)
            self._offsets[piece.choice] = offset + len(piece.text)
        reason = FINISH_REASONS.get(piece.finish)
        if not self._shape.chat:
            return [self._full(piece.choice, piece.text, logprobs, reason)]
        events = []
        if piece.text or logprobs:
            events.append(self._full(piece.choice, {"content": piece.text}, logprobs))
        if reason:
            events.append(self._full(piece.choice, {}, None, reason))
        return events

    def _full(
        self, choice: int, content: Any, logprobs: Any = None, reason: str | None = None
    ) -> bytes:
        entry = {
            "index": choice,
            "delta" if self._shape.chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        chunk: dict[str, Any] = {**self._envelope, "choices": [entry]}
        if self._shape.include_usage:
            chunk["usage"] = None
        return event(chunk)


@dataclass
class _Gathered:
    text: list[str] = field(default_factory=list)
    tokens: list[sampling_pb2.Token] = field(default_factory=list)
    finish: str | None = None


class WholeAnswer:
    """Gathers the pieces of an answer that is not streamed."""

    def __init__(self, shape: AnswerShape, prompt_tokens: int, choices: int) -> None:
        self._shape = shape
        self._prompt_tokens = prompt_tokens
        self._choices = [_Gathered() for _ in range(choices)]

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            gathered = self._choices[piece.choice]
            gathered.text.append(piece.text)
            gathered.tokens.extend(piece.tokens)
            if piece.finish:
                gathered.finish = FINISH_REASONS[piece.finish]

    def body(self) -> bytes:
        shape = self._shape
        count = sum(len(gathered.tokens) for gathered in self._choices)
        return orjson.dumps(
            {
                "id": shape.id,
                "object": "chat.completion" if shape.chat else "text_completion",
                "created": shape.created,
                "model": shape.model,
                "choices": [self._choice(i, g) for i, g in enumerate(self._choices)],
                "usage": usage(self._prompt_tokens, count),
            }
        )

    def _choice(self, index: int, gathered: _Gathered) -> dict[str, Any]:
        shape, text = self._shape, "".join(gathered.text)
        content = (
            {"message": {"role": "assistant", "content": text}} if shape.chat else {"text": text}
        )
        logprobs = format_logprobs(shape, gathered.tokens, 0) if shape.with_logprobs else None
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": gathered.finish,
        }


def format_logprobs(
    shape: AnswerShape, tokens: Sequence[sampling_pb2.Token], offset: int
) -> dict[str, Any]:
    """Log probabilities as chats and as completions show them.

    Args:
        offset: characters of the choice's text before these tokens.
    """
    pieces = shape.tokenizer.pieces
    if shape.chat:
        return {
            "content": [
                {
                    **_entry(pieces, token.token, token.logprob),
                    "top_logprobs": [_entry(pieces, t.token, t.logprob) for t in token.top],
                }
                for token in tokens
            ]
        }
    texts = [_show(pieces, token.token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {_show(pieces, t.token): _finite(t.logprob) for t in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }


def _entry(pieces: Sequence[bytes], token: int, logprob: float) -> dict[str, Any]:
    piece = pieces[token] if token < len(pieces) else b""
    return {
        "token": piece.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(piece),
    }


def _show(pieces: Sequence[bytes], token: int) -> str:
    """A token by itself; one that is no whole characters is shown by its bytes."""
    piece = pieces[token] if token < len(pieces) else b""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
