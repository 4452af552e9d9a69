"""HTTP client for what is not measured: lists of models, tokenizers and server metrics."""

import ssl
from collections.abc import Mapping

import httpx


def http_client(
    headers: Mapping[str, str] | None = None, *, timeout_s: float = 30.0
) -> httpx.Client:
    """Return a client that connects as the measured requests do.

    It ignores the proxies of the environment, and trusts the certificates that OpenSSL trusts.
    """
    return httpx.Client(
        headers=dict(headers or {}),
        timeout=timeout_s,
        trust_env=False,
        verify=ssl.create_default_context(),
    )
