"""HTTP/1.1 server with OpenAI's API."""

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import orjson

from tests.loadgen.synthetic import DEFAULT_MAX_TOKENS, MODEL, Outcome, Truth
from tests.loadgen.synthetic.answers import AnswerFormat, chunk, error_of, event_of, head_of
from tests.loadgen.synthetic.schedule import HASHED, Schedule, Slot

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection."""

    def __init__(self, server: Schedule) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._answering: asyncio.Task[None] | None = None
        self._truth: Truth | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._write: Callable[[bytes], None] = transport.write

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering and not self._answering.done():
            self._answering.cancel()

    def abort(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        now = self._loop.time()
        if (end := self._server.clear(now)) > now:
            self._transport.pause_reading()
            self._loop.call_at(end, self._resume)
        elif self._answering is None:
            self._next()

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            if self._answering is None:
                self._next()

    def _next(self) -> None:
        """Process the next request in the buffer, if it is complete."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        method_path, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) >= length:
            read = self._loop.time()
            self._buffer = rest[length:]
            method, path, _ = method_path.split(" ")
            answer = self._answer(read, f"{method} {path}", headers, rest[:length])
            self._answering = self._loop.create_task(answer)

    async def _answer(self, read: float, route: str, headers: dict[str, str], body: bytes) -> None:
        self._truth = None
        try:
            request = orjson.loads(body) if body else {}
            if route in ("POST /v1/completions", "POST /v1/chat/completions"):
                await self._generate(read, headers, request, chat="chat" in route)
            else:
                self._send(*self._metadata(route, request))
        except asyncio.CancelledError:
            if self._truth:
                self._truth.left = time.monotonic()
            raise
        except BaseException:
            self._transport.abort()
            raise
        if self._truth:
            self._truth.ended = time.monotonic()
        self._answering = None
        if headers.get("connection", "").lower() == "close":
            self._transport.close()
        elif self._buffer and not self._transport.is_closing():
            self._next()

    def _metadata(self, route: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match route:
            case "GET /v1/models":
                model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tests"}
                return 200, {"object": "list", "data": [model]}
            case "POST /tokenize":
                ids = self._prompt(request)
                return 200, {"tokens": ids, "count": len(ids), "max_model_len": HASHED}
            case "POST /detokenize":
                try:
                    return 200, {"prompt": self._server.tokenizer.decode(request["tokens"])}
                except KeyError as unknown:
                    return 400, error_of(400, f"no such token: {unknown}")
        return 404, error_of(404, "no such route")

    def _prompt(self, request: dict[str, Any]) -> list[int]:
        prompt = request.get("prompt", "")
        if "messages" in request:
            prompt = " ".join(message["content"] for message in request["messages"])
        return prompt if isinstance(prompt, list) else self._server.tokenizer.encode(prompt)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = orjson.dumps(content)
        self._write(head_of(status, "application/json", len(body)) + body)

    def _reset(self) -> None:
        self._transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
        )
        self._transport.abort()

    async def _generate(
        self, read: float, headers: dict[str, str], request: dict[str, Any], *, chat: bool
    ) -> None:
        limit = (
            request.get("max_tokens") or request.get("max_completion_tokens") or DEFAULT_MAX_TOKENS
        )
        id = headers.get("x-request-id", "")
        if not self._server.behaviour.token_ids:
            request.pop("return_token_ids", None)
        truth = self._truth = self._server.arrive(read, id, self._prompt(request), limit)
        shape = AnswerFormat(truth, request, chat=chat)
        match truth.outcome:
            case Outcome.RESET_BEFORE:
                self._reset()
            case Outcome.CLOSE_BEFORE:
                self._transport.close()
            case Outcome.MALFORMED_HTTP:
                self._write(b"\x16\x03 this is not HTTP\r\n\r\n")
                self._transport.close()
            case Outcome.STATUS_400 | Outcome.STATUS_429 | Outcome.STATUS_500:
                status = int(truth.outcome.removeprefix("status_"))
                self._send(status, error_of(status, "requested failure"))
            case Outcome.SLOW_HEADERS:
                await self._loop.create_future()
            case _ if shape.stream:
                await self._stream(truth, shape)
            case _:
                await self._send_whole(truth, shape)

    async def _stream(self, truth: Truth, shape: AnswerFormat) -> None:
        outcome = truth.outcome
        empty = truth.outcome is Outcome.EMPTY
        spans = [] if empty else self._server.spans(truth.max_tokens)
        self._write(head_of(200, "text/event-stream", None) + chunk(shape.greeting()))
        if outcome is Outcome.SLOW:
            await self._loop.create_future()
        async with Slot(self._server, truth) as slot:
            for i, span in enumerate(spans):
                await slot.until(i)
                data = shape.event(span, "length" if i == len(spans) - 1 else None)
                if i == len(spans) // 2:
                    if self._break_off(outcome):
                        return
                    if outcome is Outcome.MALFORMED_JSON:
                        self._write(chunk(b'data: {"id": \n\n'))
                        continue
                truth.written.append(time.monotonic())
                self._write(chunk(data))
            if empty:
                await slot.until(0)
        done = b"" if outcome is Outcome.NO_DONE else chunk(b"data: [DONE]\n\n")
        usage = shape.usage(0 if empty else truth.max_tokens)
        self._write(chunk(usage) + done + b"0\r\n\r\n")

    def _break_off(self, outcome: Outcome) -> bool:
        """End a stream midway if the outcome requires it; return whether it did."""
        match outcome:
            case Outcome.RESET_MIDWAY:
                self._reset()
            case Outcome.HALF_CLOSE:
                self._transport.close()
            case Outcome.ERROR_EVENT:
                error = event_of(error_of(500, "requested failure midway"))
                self._write(chunk(error) + b"0\r\n\r\n")
            case _:
                return False
        return True

    async def _send_whole(self, truth: Truth, shape: AnswerFormat) -> None:
        """Send an answer without streaming, when the last event would be due.

        Outcomes that break off midway do so after half of the bytes.
        """
        outcome = truth.outcome
        kind = "application/json"
        empty = outcome is Outcome.EMPTY
        body = shape.whole(range(0 if empty else truth.max_tokens))
        if outcome is Outcome.SLOW:
            self._write(head_of(200, kind, len(body)))
            await self._loop.create_future()
        async with Slot(self._server, truth) as slot:
            await slot.until(0 if empty else len(self._server.spans(truth.max_tokens)) - 1)
        head = head_of(200, kind, len(body))
        match outcome:
            case Outcome.ERROR_EVENT:
                self._send(500, error_of(500, "requested failure"))
            case Outcome.RESET_MIDWAY | Outcome.HALF_CLOSE:
                self._write(head + body[: len(body) // 2])
                self._break_off(outcome)
            case Outcome.MALFORMED_JSON:
                self._write(head + b"{" * len(body))
            case Outcome.EMPTY:
                self._write(head + body)
            case _:
                truth.written.append(time.monotonic())
                self._write(head + body)
