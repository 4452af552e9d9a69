"""Encoding of HTTP answers."""

import time
from typing import Any

import orjson

from tests.loadgen.synthetic import MODEL, Truth
from tests.loadgen.synthetic.schedule import text_of


class AnswerFormat:
    """JSON format of one answer."""

    def __init__(self, truth: Truth, request: dict[str, Any], *, chat: bool) -> None:
        self.stream = bool(request.get("stream"))
        self._chat = chat
        self._include_usage = bool((request.get("stream_options") or {}).get("include_usage"))
        self._has_ids = bool(request.get("return_token_ids")) and not chat
        self._prompt_tokens = truth.prompt_tokens
        self._cached_tokens = truth.cached_tokens
        kind = "text_completion"
        if chat:
            kind = "chat.completion.chunk" if self.stream else "chat.completion"
        self._envelope = {"id": truth.id, "object": kind, "created": int(time.time())}
        self._envelope["model"] = MODEL

    def event(self, tokens: range, finish: str | None) -> bytes:
        """Return the event of some tokens."""
        part: dict[str, Any] = {"text": text_of(tokens)}
        if self._chat:
            part = {"delta": {"content": text_of(tokens)}}
        if self._has_ids:
            part["token_ids"] = list(tokens)
        return self._event(part, finish)

    def _event(self, part: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish}
        content_ = {**self._envelope, "choices": [choice]}
        return event_of({**content_, "usage": None} if self._include_usage else content_)

    def greeting(self) -> bytes:
        """Return the first event of a chat, which contains no token."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return self._event(role, None) if self._chat else b""

    def usage(self, tokens: int) -> bytes:
        """Return the usage event, if requested."""
        if not self._include_usage:
            return b""
        return event_of({**self._envelope, "choices": [], "usage": self._usage(tokens)})

    def whole(self, tokens: range) -> bytes:
        """Return an answer without streaming."""
        part: dict[str, Any] = {"text": text_of(tokens)}
        if self._chat:
            part = {"message": {"role": "assistant", "content": text_of(tokens)}}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length"}
        usage = self._usage(len(tokens))
        return orjson.dumps({**self._envelope, "choices": [choice], "usage": usage})

    def _usage(self, tokens: int) -> dict[str, Any]:
        prompt = self._prompt_tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": tokens}
        if self._cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens}
        return usage | {"total_tokens": prompt + tokens}


_ERRORS = {400: "invalid_request_error", 429: "rate_limit_error", 500: "server_error"}


def error_of(status: int, message: str) -> dict[str, Any]:
    kind = _ERRORS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": kind}}


def event_of(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def head_of(status: int, kind: str, length: int | None) -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 {status} Synthetic\r\ncontent-type: {kind}\r\n{framing}\r\n\r\n".encode()
