"""The target of a URL, and what it serves."""

from typing import Any
from urllib.parse import urlsplit

import httpx

from loadgen.errors import UsageError
from loadgen.target.base import Options, Target
from loadgen.target.http import Endpoint, HttpTarget
from loadgen.target.rpc import RpcTarget

_RPC = "grpc://"


def is_rpc(url: str) -> bool:
    """Whether a URL is that of Headrace's own interface."""
    return url.startswith(_RPC)


def open_target(
    url: str, options: Options, endpoint: Endpoint = Endpoint.COMPLETIONS, key: str | None = None
) -> Target:
    """``http://host:port/v1`` or ``grpc://host:port``. Call it in a running event loop.

    Raises:
        UsageError: it is neither.
    """
    if is_rpc(url):
        return RpcTarget(url.removeprefix(_RPC), options, api_key=key)
    return HttpTarget(url, options, endpoint=endpoint, api_key=key)


def listed_model(url: str, headers: dict[str, str]) -> str:
    """The first model that an HTTP target lists; "" for gRPC, where there is only one.

    Raises:
        UsageError: it lists none.
    """
    if is_rpc(url):
        return ""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=30)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        where = urlsplit(url).hostname
        raise UsageError(f"{where} lists no model; name one with --model: {error}") from error


def metrics_of(url: str) -> str | None:
    """Where an HTTP target's metrics are by custom: beside its ``/v1``."""
    if is_rpc(url):
        return None
    return url.rstrip("/").removesuffix("/v1") + "/metrics"


def headers_of(key: str | None) -> dict[str, Any]:
    return {} if key is None else {"authorization": f"Bearer {key}"}
