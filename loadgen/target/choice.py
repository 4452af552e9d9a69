"""Opening a target by its URL, and finding its model and metrics."""

from typing import Any
from urllib.parse import urlsplit

import httpx

from loadgen.errors import UsageError
from loadgen.target.base import Endpoint, Options, Target
from loadgen.target.http import HttpTarget
from loadgen.target.replicas import Replicas
from loadgen.target.rpc import RpcTarget

_RPC = "grpc://"


def first_of(url: str) -> str:
    """Return the first of several URLs separated by commas."""
    return url.split(",", 1)[0]


def is_rpc(url: str) -> bool:
    """Return whether the URL is that of Headrace's gRPC interface."""
    return url.startswith(_RPC)


def open_target(
    url: str, options: Options, endpoint: Endpoint = Endpoint.COMPLETIONS, key: str | None = None
) -> Target:
    """Open a target. Call this in a running event loop.

    Args:
        url: ``http://host:port/v1`` or ``grpc://host:port``, or several of them separated by
            commas, for replicas that receive requests in turn.

    Raises:
        UsageError: if a URL is neither.
    """
    if len(urls := url.split(",")) > 1:
        return Replicas([open_target(one, options, endpoint, key) for one in urls])
    if is_rpc(url):
        return RpcTarget(url.removeprefix(_RPC), options, api_key=key)
    return HttpTarget(url, options, endpoint=endpoint, api_key=key)


def listed_model(url: str, headers: dict[str, str]) -> str:
    """Return the first model listed by an HTTP target; "" for gRPC, which serves only one.

    Replicas serve the model of the first one.

    Raises:
        UsageError: if no model is listed.
    """
    url = first_of(url)
    if is_rpc(url):
        return ""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=30)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        where = urlsplit(url).hostname
        raise UsageError(f"{where} lists no model; give one with --model: {error}") from error


def metrics_url(url: str) -> str | None:
    """Return the conventional metrics URL of an HTTP target: ``/metrics`` beside its ``/v1``."""
    url = first_of(url)
    if is_rpc(url):
        return None
    return url.rstrip("/").removesuffix("/v1") + "/metrics"


def auth_headers(key: str | None) -> dict[str, Any]:
    return {} if key is None else {"authorization": f"Bearer {key}"}
