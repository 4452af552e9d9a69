"""Finding the API of a target: its root, which usually ends in ``/v1``, and the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from loadgen.errors import UsageError
from loadgen.http_client import http_client

RPC = "grpc://"
_VERSION = "/v1"
_ENDPOINTS = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")
_NO_ACCESS = (401, 403)


@dataclass(frozen=True)
class Api:
    """API of a target.

    Attributes:
        url: root of the API; for replicas all roots, separated by commas.
        model: model to request; "" for gRPC, which serves only one.
    """

    url: str
    model: str


class _NotListed(Exception):
    """A URL lists no models; the message says why."""


def is_rpc(url: str) -> bool:
    """Return whether the URL is that of Headrace's gRPC interface."""
    return url.startswith(RPC)


def find_api(url: str, model: str | None = None, headers: Mapping[str, str] | None = None) -> Api:
    """Return the API at a URL, which may lack ``/v1``.

    The root is the URL that lists models: the given one, or the given one with ``/v1``. Replicas
    serve the model of the first one.

    Args:
        url: one URL, or several separated by commas.
        model: model to request; None for the first one that is listed.

    Raises:
        UsageError: if a URL is not valid, the server cannot be reached or requires another key, or
            ``model`` is None and none is listed.
    """
    found = [_find(one, model, headers) for one in url.split(",")]
    return Api(",".join(one.url for one in found), found[0].model)


def shown(url: str) -> str:
    """Return a URL without credentials."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _find(url: str, model: str | None, headers: Mapping[str, str] | None) -> Api:
    if is_rpc(url):
        return Api(url, model or "")
    url = _checked(url)
    if model is not None and url.endswith(_VERSION):
        return Api(url, model)
    tried = []
    with http_client(headers) as client:
        for root in _roots(url):
            try:
                listed = _first_model(client, root)
                return Api(root, model or listed)
            except _NotListed as error:
                tried.append(f"{shown(root)}/models ({error})")
    if model is not None:  # the server may have no list
        return Api(url, model)
    raise UsageError(
        f"no list of models at {' or '.join(tried)}: give the root of the API, such as "
        "http://host:8000/v1, or the model with --model"
    )


def _checked(url: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        UsageError: if it is not an HTTP URL, or that of an endpoint.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(
            f"{url} is not a URL such as http://host:8000/v1, https://host/v1 or grpc://host:8001"
        )
    url = url.rstrip("/")
    for endpoint in _ENDPOINTS:
        if url.endswith(endpoint):
            root = shown(url.removesuffix(endpoint))
            raise UsageError(f"{shown(url)} is an endpoint: give the root of the API, {root}")
    return url


def _roots(url: str) -> tuple[str, ...]:
    """Return possible roots of the API, the most probable first.

    A URL without a path may also answer at its top with another API, as that of llama.cpp does.
    """
    if url.endswith(_VERSION):
        return (url,)
    return (url, url + _VERSION) if urlsplit(url).path else (url + _VERSION, url)


def _first_model(client: httpx.Client, root: str) -> str:
    """Return the first model that is listed.

    Raises:
        UsageError: if the server cannot be reached, or requires another key.
        _NotListed: if it lists none.
    """
    try:
        answer = client.get(f"{root}/models")
    except httpx.TimeoutException:
        raise _NotListed("no answer in time") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"cannot reach {shown(root)}: {reason}; is the server running?") from error
    if answer.status_code in _NO_ACCESS:
        raise UsageError(
            f"{shown(root)}/models answered {answer.status_code}: give a valid key with --api-key"
        )
    if not answer.is_success:
        location = answer.headers.get("location")
        redirect = f", a redirect to {location}" if location else ""
        raise _NotListed(f"status {answer.status_code}{redirect}")
    try:
        return str(answer.json()["data"][0]["id"])
    except IndexError:
        raise _NotListed("an empty list") from None
    except (ValueError, LookupError, TypeError):
        raise _NotListed("not a list of models") from None
