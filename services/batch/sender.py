"""Sending of the requests of a batch: a bounded number at a time, with retries."""

import asyncio
import random
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import orjson

from services.batch.answers import TRANSIENT, Answer
from services.batch.requests import BatchRequest
from services.common.errors import SettingsError

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 60.0
_CONNECT_S = 10.0
_REFUSES_ALL = {401: "the API key", 403: "this client"}
"""Statuses that all requests would get, and what the server does not accept."""
_MAX_QUOTED_CHARS = 500


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
    """

    url: str
    api_key: str | None = None
    concurrency: int = 32
    retries: int = 10
    timeout_s: float = 3600.0


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
        timeout=httpx.Timeout(server.timeout_s, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=server.concurrency),
        trust_env=False,
        verify=ssl.create_default_context(),
    )

    async def work() -> None:
        for request in requests:
            done(await _send(client, request, server.retries))

    async with client:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(server.concurrency):
                    tasks.create_task(work())
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
        else:
            return
    raise first


async def _send(client: httpx.AsyncClient, request: BatchRequest, retries: int) -> Answer:
    """Send a request until it has an answer that another attempt would not change."""
    attempt = 0
    while True:
        pause_s = random.uniform(0.5, 1) * min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S)
        try:
            response = await client.post(request.path, content=request.body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if attempt == retries:
                raise BatchStopped(f"{client.base_url} cannot be reached: {error}") from None
        except httpx.TransportError as error:
            if attempt == retries:
                message = str(error) or type(error).__name__
                return Answer(request.custom_id, error=("connection_error", message))
        else:
            if what := _REFUSES_ALL.get(response.status_code):
                raise BatchStopped(f"the server does not accept {what}: {_quoted(response)}")
            if response.status_code not in TRANSIENT or attempt == retries:
                return _answer(request, response)
            pause_s = max(pause_s, _retry_after_s(response))
        attempt += 1
        await asyncio.sleep(pause_s)


def _answer(request: BatchRequest, response: httpx.Response) -> Answer:
    try:
        body: Any = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        if response.is_success:
            return Answer(request.custom_id, error=("invalid_response", _quoted(response)))
        body = {"error": {"message": _quoted(response)}}
    request_id = response.headers.get("x-request-id")
    return Answer(request.custom_id, response.status_code, request_id, body)


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
    return response.text[:_MAX_QUOTED_CHARS]
