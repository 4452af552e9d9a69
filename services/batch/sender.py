"""Sending of the requests of a batch: a bounded number at a time, with retries."""

import asyncio
import random
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
import orjson

from services.batch.answers import TRANSIENT, Answer
from services.batch.requests import BatchRequest, load_json
from services.common.errors import SettingsError

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 60.0
_CONNECT_S = 10.0
_REFUSES_ALL = {401: "the API key", 403: "this client"}
"""Statuses that all requests would get, and what the server does not accept."""
_MAX_QUOTED_CHARS = 500


class InvalidServer(SettingsError):
    """The URL or the API key cannot be used for any request."""


class BatchStopped(SettingsError):
    """The server cannot be used; the requests that are not answered were not sent or failed."""


@dataclass(frozen=True)
class Server:
    """A server, and the limits for requests to it.

    Attributes:
        url: base URL, with or without ``/v1``.
        api_key: bearer token.
        concurrency: maximum number of requests in progress.
        retries: maximum number of retries of a request.
        timeout_s: time limit of each attempt.

    Raises:
        InvalidServer: if the URL or the API key is invalid.
    """

    url: str
    api_key: str | None = None
    concurrency: int = 32
    retries: int = 10
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if not _is_server(self.url):
            raise InvalidServer(f"{self.url!r} is not the URL of a server: http://HOST:PORT")
        if self.api_key is not None and not _is_header_value(self.api_key):
            raise InvalidServer("the API key must be printable ASCII, without spaces at its ends")


def _is_server(text: str) -> bool:
    """Return whether a text is a URL to which requests can be sent. Its host may be unknown."""
    try:
        url = httpx.URL(text)
        host = url.host
        host.encode("idna")  # the socket module does this, too
    except (httpx.InvalidURL, ValueError):
        return False
    is_base = url.scheme in ("http", "https") and "?" not in text and "#" not in text
    is_host = bool(host) and ("%" not in host or ":" in host)  # escaped, but for a zone of IPv6
    return is_base and is_host and (url.port is None or 0 < url.port < 1 << 16)


def _is_header_value(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and text == text.strip()


async def send_all(
    server: Server, requests: Iterator[BatchRequest], done: Callable[[Answer], None]
) -> None:
    """Send requests, and call ``done`` with each answer as it arrives.

    Requests are taken from the iterator when they are sent. Proxies of the environment are ignored.

    Raises:
        BatchStopped: if the server cannot be reached after all retries, or refuses all requests.
    """
    headers = {"content-type": "application/json"}
    if server.api_key is not None:
        headers["authorization"] = f"Bearer {server.api_key}"
    client = httpx.AsyncClient(
        base_url=server.url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(None, connect=min(_CONNECT_S, 0.9 * server.timeout_s)),
        limits=httpx.Limits(max_connections=server.concurrency),
        trust_env=False,
        verify=ssl.create_default_context(),
    )

    async def work() -> None:
        for request in requests:
            done(await _send(client, request, server))

    async with client:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(server.concurrency):
                    tasks.create_task(work())
        except ExceptionGroup as errors:
            first: Exception = errors
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
        else:
            return
    raise first


async def _send(client: httpx.AsyncClient, request: BatchRequest, server: Server) -> Answer:
    """Send a request until it has an answer that another attempt would not change."""
    attempt = 0
    while True:
        pause_s = random.uniform(0.5, 1) * min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S)
        try:
            async with asyncio.timeout(server.timeout_s):
                response = await client.post(request.path, content=request.body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if attempt == server.retries:
                raise BatchStopped(f"{client.base_url} cannot be reached: {error}") from None
        except httpx.DecodingError as error:
            return Answer(request.custom_id, error=("invalid_response", str(error)))
        except (httpx.TransportError, TimeoutError) as error:
            if attempt == server.retries:
                message = str(error) or type(error).__name__
                return Answer(request.custom_id, error=("connection_error", message))
        else:
            if what := _REFUSES_ALL.get(response.status_code):
                raise BatchStopped(f"the server does not accept {what}: {_quoted(response)}")
            if response.status_code not in TRANSIENT or attempt == server.retries:
                return _answer(request, response)
            pause_s = max(pause_s, _retry_after_s(response))
        attempt += 1
        await asyncio.sleep(pause_s)


def _answer(request: BatchRequest, response: httpx.Response) -> Answer:
    try:
        body = _on_one_line(response.content)
    except ValueError:
        if response.is_success:
            return Answer(request.custom_id, error=("invalid_response", _quoted(response)))
        body = orjson.dumps({"error": {"message": _quoted(response)}})
    request_id = response.headers.get("x-request-id")
    return Answer(request.custom_id, response.status_code, request_id, body)


def _on_one_line(text: bytes) -> bytes:
    """Return JSON without its line breaks, which are only between tokens.

    Values are not changed, such as integers of more than 64 bits.

    Raises:
        ValueError: if the text is not JSON, or has more than 254 levels.
    """
    load_json(text)
    return text.translate(None, b"\r\n")


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds to wait before another attempt, from ``Retry-After``."""
    value = response.headers.get("retry-after", "0")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), _MAX_PAUSE_S)


def _quoted(response: httpx.Response) -> str:
    """Return the beginning of the body as UTF-8; `httpx` may not know the charset that it has."""
    return response.content.decode(errors="replace")[:_MAX_QUOTED_CHARS]
