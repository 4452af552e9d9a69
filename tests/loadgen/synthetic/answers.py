"""Bytes of HTTP answers."""

import time
from typing import Any

import orjson

from tests.loadgen.synthetic import MODEL, Truth
from tests.loadgen.synthetic.schedule import text_of


class Shape:
    """The JSON of one answer."""

    def __init__(self, truth: Truth, asked: dict[str, Any], *, chat: bool) -> None:
        self.stream = bool(asked.get("stream"))
        self._chat = chat
        self._counted = bool((asked.get("stream_options") or {}).get("include_usage"))
        self._prompt_tokens = truth.prompt_tokens
        kind = "text_completion"
        if chat:
            kind = "chat.completion.chunk" if self.stream else "chat.completion"
        self._envelope = {"id": truth.id, "object": kind, "created": int(time.time())}
        self._envelope["model"] = MODEL

    def event(self, content: str | dict[str, str], finish: str | None) -> bytes:
        """One event; of a chat, ``content`` may be a whole delta."""
        part: dict[str, Any] = {"text": content}
        if self._chat:
            part = {"delta": {"content": content} if isinstance(content, str) else content}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish}
        content_ = {**self._envelope, "choices": [choice]}
        return event_of({**content_, "usage": None} if self._counted else content_)

    def greeting(self) -> bytes:
        """What a chat begins with, long before its first token: no client may take it for one."""
        return self.event({"role": "assistant", "content": ""}, None) if self._chat else b""

    def usage(self, tokens: int) -> bytes:
        """The event after the last one, where it was asked for."""
        if not self._counted:
            return b""
        return event_of({**self._envelope, "choices": [], "usage": self._usage(tokens)})

    def whole(self, tokens: range) -> bytes:
        """The answer that is not streamed."""
        part: dict[str, Any] = {"text": text_of(tokens)}
        if self._chat:
            part = {"message": {"role": "assistant", "content": text_of(tokens)}}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length"}
        usage = self._usage(len(tokens))
        return orjson.dumps({**self._envelope, "choices": [choice], "usage": usage})

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        both = prompt + tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": both}


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
    return f"HTTP/1.1 {status} Told\r\ncontent-type: {kind}\r\n{framing}\r\n\r\n".encode()
