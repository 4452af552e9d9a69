"""Any server that speaks OpenAI's API over HTTP."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from yarl import URL

from loadgen.clock import Clock
from loadgen.errors import UsageError
from loadgen.plan import Planned
from loadgen.record import Failure, Record
from loadgen.target.base import Failed, Options, add_piece, settle
from loadgen.target.events import EventError, Events

_BUSY = (429, 503)
_SHOWN = 300
"""Characters of an error that are kept."""
_READ = 1 << 16


class Endpoint(StrEnum):
    """Which of the API's two ways to generate."""

    COMPLETIONS = "completions"
    CHAT = "chat"


_PATHS = {Endpoint.COMPLETIONS: "/completions", Endpoint.CHAT: "/chat/completions"}


class HttpTarget:
    """``base`` is the API's root, with its ``/v1``. Make it in a running event loop.

    Raises:
        UsageError: chats have no prompts of token ids, or the URL is none.
    """

    def __init__(
        self,
        base: str,
        options: Options,
        *,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
        api_key: str | None = None,
    ) -> None:
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{base} is no http or https URL")
        self.name = f"{parts.scheme}://{parts.hostname}:{parts.port or parts.scheme}{parts.path}"
        self._url = URL(base.rstrip("/") + _PATHS[endpoint])  # not parsed again for every request
        self._options, self._endpoint = options, endpoint
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ,
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, planned: Planned, record: Record, clock: Clock) -> None:
        body = orjson.dumps(self._body(planned))
        error: Exception | None = None
        record.sent = clock()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._exchange(body, planned, record, clock)
        except Exception as caught:  # noqa: BLE001 - `settle` raises what is none of the target's
            error = caught
        settle(record, clock, error)

    async def _exchange(self, body: bytes, planned: Planned, record: Record, clock: Clock) -> None:
        with _failures(Failure.RESET):
            response = await self._session.post(self._url, data=body)
        try:
            with _failures(Failure.INTERRUPTED):
                if response.status != 200:
                    raise await _refusal(response)
                await self._read(response, planned, record, clock)
        except BaseException:
            response.close()  # nobody else is to get this connection
            raise
        response.release()

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        planned: Planned,
        record: Record,
        clock: Clock,
    ) -> None:
        answer = _Answer(planned, record, keep=self._options.keep_answers)
        events = Events()
        async for received in response.content.iter_any():
            at = clock()
            for data in events.feed(received):
                answer.take(data, at)
        answer.end()

    def _body(self, planned: Planned) -> dict[str, Any]:
        prompt, options = planned.ask.prompt, self._options
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": planned.ask.output_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if self._endpoint is Endpoint.COMPLETIONS:
            body["prompt"] = prompt
        elif isinstance(prompt, str):
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            raise UsageError("a chat has no prompt of token ids")
        return body | options.extra


class _Answer:
    """What the events of one answer add up to."""

    def __init__(self, planned: Planned, record: Record, *, keep: bool) -> None:
        self._planned, self._record, self._keep = planned, record, keep
        self._finished = self._done = False

    def take(self, data: bytes, at: float) -> None:
        """One event's data, which came ``at`` this time."""
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = orjson.loads(data)
            if error := event.get("error"):
                raise Failed(Failure.SERVER_ERROR, _shown(error))
            if usage := event.get("usage"):
                self._record.reported_tokens = int(usage["completion_tokens"])
                self._record.input_tokens = int(usage["prompt_tokens"])
            for choice in event.get("choices", ()):
                self._choice(choice, at)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Failed(Failure.MALFORMED, f"an event that is none: {data[:_SHOWN]!r}") from error

    def _choice(self, choice: dict[str, Any], at: float) -> None:
        if choice.get("finish_reason") is not None:
            self._finished = True
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        if text:
            if self._keep:
                self._record.text += text
            add_piece(self._record, self._planned, at, 1)

    def end(self) -> None:
        """Nothing more comes."""
        if not self._done:
            raise Failed(Failure.INTERRUPTED, "the answer ended without its last event")
        if not self._finished and not self._record.times:
            raise Failed(Failure.MALFORMED, "an answer without a token, and without a reason")


@contextmanager
def _failures(broken: Failure) -> Iterator[None]:
    """Says how a request failed; ``broken``: what a connection that breaks means at this point."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise Failed(Failure.REFUSED, str(error)) from error
    except (aiohttp.ClientResponseError, EventError) as error:
        raise Failed(Failure.MALFORMED, str(error)[:_SHOWN]) from error
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            raise
        raise Failed(broken, f"{type(error).__name__}: {error}"[:_SHOWN]) from error


async def _refusal(response: aiohttp.ClientResponse) -> Failed:
    status = response.status
    body = (await response.content.read(_READ)).decode(errors="replace")
    failure = Failure.SERVER_ERROR
    if status in _BUSY:
        failure = Failure.REJECTED
    elif 400 <= status < 500:
        failure = Failure.CLIENT_ERROR
    return Failed(failure, f"status {status}: {body[:_SHOWN]}")


def _shown(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:_SHOWN]
