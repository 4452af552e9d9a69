"""Opening a target by its URL, and finding its metrics."""

from loadgen.errors import UsageError
from loadgen.target.api import RPC, is_rpc
from loadgen.target.base import Endpoint, Options, Target
from loadgen.target.http import HttpTarget
from loadgen.target.replicas import Replicas
from loadgen.target.rpc import RpcTarget


def first_of(url: str) -> str:
    """Return the first of several URLs separated by commas."""
    return url.split(",", 1)[0]


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
        if endpoint is Endpoint.EMBEDDINGS:
            raise UsageError("--endpoint embeddings needs an HTTP target")
        return RpcTarget(url.removeprefix(RPC), options, endpoint=endpoint, api_key=key)
    return HttpTarget(url, options, endpoint=endpoint, api_key=key)


def metrics_url(url: str) -> str | None:
    """Return the conventional metrics URL of an HTTP target: ``/metrics`` beside its ``/v1``."""
    url = first_of(url)
    if is_rpc(url):
        return None
    return url.rstrip("/").removesuffix("/v1") + "/metrics"


def auth_headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}
