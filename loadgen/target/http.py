"""Target for servers with OpenAI's API over HTTP."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from yarl import URL

from loadgen.clock import Clock
from loadgen.errors import UsageError
from loadgen.record import Failure, Record
from loadgen.schedule import ScheduledRequest
from loadgen.target.base import (
    Endpoint,
    Options,
    RequestFailed,
    add_chunk,
    finish,
    joined,
    messages,
    until_cancelled,
)
from loadgen.target.embeddings import embeddings_body, take_embeddings
from loadgen.target.events import EventError, Events
from loadgen.target.text import text_of, unknown_fields

_BUSY = (429, 503)
_MAX_DETAIL = 300
"""Maximum characters of an error message that are recorded."""
_READ_BYTES = 1 << 16
_MAX_UNKNOWN = 8
"""Number of unknown fields after which an answer's fields are not collected any more."""

_TOKEN_IDS = "return_token_ids"
_NO_TOKEN_IDS = (
    "{} returns no token ids of answers, of which the histories of chats with --token-ids consist: "
    f"omit --token-ids, or use a server that supports {_TOKEN_IDS}, such as Headrace, or vLLM from "
    "0.10.2 on"
)

_PATHS = {
    Endpoint.COMPLETIONS: "/completions",
    Endpoint.CHAT: "/chat/completions",
    Endpoint.EMBEDDINGS: "/embeddings",
}


class HttpTarget:
    """Target over HTTP. Create it in a running event loop.

    Args:
        base: root of the API, including ``/v1``.

    Raises:
        UsageError: if the URL is invalid.
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
            raise UsageError(f"{base} is not an http or https URL")
        self.name = f"{parts.scheme}://{parts.hostname}:{parts.port or parts.scheme}{parts.path}"
        self._url = URL(base.rstrip("/") + _PATHS[endpoint])  # parsed once
        self._options = options
        self._endpoint = endpoint
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        """Send one request and write its result into ``record``.

        Raises:
            UsageError: if the options need token ids of answers, and the server returns none.
        """
        body = orjson.dumps(self._body(scheduled))
        error: Exception | None = None
        record.sent = clock()
        try:
            async with asyncio.timeout(self._options.timeout_s), until_cancelled(scheduled):
                await self._exchange(body, scheduled, record, clock)
        except _NoTokenIds:
            error = UsageError(_NO_TOKEN_IDS.format(self.name))
        except Exception as caught:  # noqa: BLE001 - `finish` raises bugs
            error = caught
        finish(record, clock, error)

    async def _exchange(
        self, body: bytes, scheduled: ScheduledRequest, record: Record, clock: Clock
    ) -> None:
        with _failures(Failure.RESET):
            response = await self._session.post(self._url, data=body)
        try:
            with _failures(Failure.INTERRUPTED):
                if response.status != 200:
                    refusal = await _refusal(response)
                    if self._options.token_ids and _TOKEN_IDS in str(refusal):
                        raise _NoTokenIds
                    raise refusal
                await self._read(response, scheduled, record, clock)
        except BaseException:
            response.close()  # the connection must not be reused
            raise
        response.release()

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        scheduled: ScheduledRequest,
        record: Record,
        clock: Clock,
    ) -> None:
        if self._endpoint is Endpoint.EMBEDDINGS:
            body = await response.read()
            take_embeddings(body, scheduled, record, self._options, clock())
            return
        answer = _Answer(scheduled, record, self._options)
        events = Events()
        async for received in response.content.iter_any():
            at = clock()
            for data in events.feed(received):
                answer.take(data, at)
        answer.end()

    def _body(self, scheduled: ScheduledRequest) -> dict[str, Any]:
        prompt, options = scheduled.spec.prompt, self._options
        if self._endpoint is Endpoint.EMBEDDINGS:
            return embeddings_body(prompt, options)
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": scheduled.spec.output_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.token_ids:
            body[_TOKEN_IDS] = True
        if self._endpoint is Endpoint.COMPLETIONS:
            body["prompt"] = joined(prompt)
        else:
            body["messages"] = [{"role": role, "content": text} for role, text in messages(prompt)]
        return body | options.extra


class _NoTokenIds(Exception):
    """The server does not return the token ids that were requested."""


class _Answer:
    """State of one streamed answer."""

    def __init__(self, scheduled: ScheduledRequest, record: Record, options: Options) -> None:
        self._scheduled = scheduled
        self._record = record
        self._keep = options.keep_answers
        self._with_ids = options.token_ids
        self._finished = self._done = False
        self._unknown: set[str] = set()

    def take(self, data: bytes, at: float) -> None:
        """Process the data of one event that arrived at time ``at``."""
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = orjson.loads(data)
            if error := event.get("error"):
                raise RequestFailed(Failure.SERVER_ERROR, _message(error))
            if usage := event.get("usage"):
                self._record.reported_tokens = int(usage["completion_tokens"])
                self._record.input_tokens = int(usage["prompt_tokens"])
                self._record.cached_tokens = _cached_tokens(usage)
            for choice in event.get("choices", ()):
                self._choice(choice, at)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestFailed(
                Failure.MALFORMED, f"invalid event: {data[:_MAX_DETAIL]!r}"
            ) from error

    def _choice(self, choice: dict[str, Any], at: float) -> None:
        if choice.get("finish_reason") is not None:
            self._finished = True
        text = text_of(choice)
        if self._keep:
            self._record.text += text
        if self._with_ids:
            self._token_ids(choice, at)
        elif text:
            add_chunk(self._record, self._scheduled, at, 1)
        elif len(self._unknown) < _MAX_UNKNOWN:
            self._unknown |= unknown_fields(choice)

    def _token_ids(self, choice: dict[str, Any], at: float) -> None:
        """Record the tokens of an event, which may have no text yet."""
        ids = choice.get("token_ids")
        if ids is None:
            raise _NoTokenIds
        if self._keep:
            self._record.token_ids += ids
        if ids:
            add_chunk(self._record, self._scheduled, at, len(ids))

    def end(self) -> None:
        """Raise `RequestFailed` if the stream is not complete, or its text is not found."""
        if not self._done:
            raise RequestFailed(Failure.INTERRUPTED, "the answer ended without its final event")
        if not self._finished and not self._record.times:
            raise RequestFailed(
                Failure.MALFORMED, "an answer without a token and without a finish reason"
            )
        reported = self._record.reported_tokens or 0
        if not self._record.times and (self._unknown or reported > 1):  # one token may be EOS alone
            fields = ", ".join(sorted(self._unknown)) or "none"
            raise RequestFailed(
                Failure.NO_TEXT,
                f"no event has text in a known field, but the server reports {reported} tokens; "
                f"unknown fields: {fields}"[:_MAX_DETAIL],
            )


def _cached_tokens(usage: dict[str, Any]) -> int | None:
    """Return the number of prompt tokens from the prefix cache; None if it is not reported."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return None if cached is None else int(cached)


@contextmanager
def _failures(broken: Failure) -> Iterator[None]:
    """Translate exceptions to `RequestFailed`.

    Args:
        broken: kind of failure if the connection breaks within the block.
    """
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise RequestFailed(Failure.REFUSED, str(error)) from error
    except (aiohttp.ClientResponseError, EventError) as error:
        raise RequestFailed(Failure.MALFORMED, str(error)[:_MAX_DETAIL]) from error
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            raise
        raise RequestFailed(broken, f"{type(error).__name__}: {error}"[:_MAX_DETAIL]) from error


async def _refusal(response: aiohttp.ClientResponse) -> RequestFailed:
    status = response.status
    body = (await response.content.read(_READ_BYTES)).decode(errors="replace")
    failure = Failure.SERVER_ERROR
    if status in _BUSY:
        failure = Failure.REJECTED
    elif 400 <= status < 500:
        failure = Failure.CLIENT_ERROR
    return RequestFailed(failure, f"status {status}: {_reason(body)}")


def _reason(body: str) -> str:
    """Return the message in the JSON of an error, or the whole body if there is none."""
    try:
        content = orjson.loads(body)
    except ValueError:
        return body[:_MAX_DETAIL]
    fields = content if isinstance(content, dict) else {}
    found = (fields.get(name) for name in ("error", "message", "detail"))
    return _message(next((one for one in found if one), body))


def _message(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or error)[:_MAX_DETAIL]
