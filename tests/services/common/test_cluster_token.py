"""Servers accept the cluster token and, while one replaces another, a second one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from services.common.cluster_token import TokenCheck
from services.common.errors import SettingsError
from services.common.grpc_server import GrpcServer, credentials
from services.common.metrics_server import start_metrics_server
from services.common.secret_metrics import SecretMetrics
from services.common.settings import ServiceSettings
from services.router.settings import RouterSettings
from tests.services.tls_ports import router_port

FIRST, SECOND = "the-first-token", "the-second-token"
TOKENS = {"cluster_token": FIRST, "second_cluster_token": SECOND}
OTHERS = ("", "other", FIRST + SECOND, FIRST[:-1], f"{FIRST} {SECOND}")

Accepts = Callable[[str], Any]
"""Calls a server with a token, and returns whether it was accepted."""


async def _answers(url: str, token: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(url, headers=dict(credentials(token)))
    assert answer.status_code in (200, 401)
    return answer.status_code == 200


@asynccontextmanager
async def router(path: str, **tokens: str) -> AsyncIterator[Accepts]:
    async with router_port(settings=tokens) as port:
        yield lambda token: _answers(f"http://127.0.0.1:{port}{path}", token)


def router_calls(**tokens: str) -> AbstractAsyncContextManager[Accepts]:
    return router("/v1/workers", **tokens)


def router_metrics(**tokens: str) -> AbstractAsyncContextManager[Accepts]:
    return router("/metrics", **tokens)


@asynccontextmanager
async def worker(**tokens: str) -> AsyncIterator[Accepts]:
    async def echo(request: bytes, _context: object) -> bytes:
        return request

    check = ServiceSettings.model_validate(tokens).token_check
    server = GrpcServer("127.0.0.1:0", [], token_check=check)
    method: Any = grpc.unary_unary_rpc_method_handler(echo)
    handler = grpc.method_handlers_generic_handler("test.Service", {"Echo": method})
    server.server.add_generic_rpc_handlers((handler,))
    await server.start()

    async def accepts(token: str) -> bool:
        async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            method: Any = channel.unary_unary("/test.Service/Echo")
            code = await method(b"", metadata=credentials(token)).code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
        return code is grpc.StatusCode.OK

    yield accepts
    await server.stop(0)


@asynccontextmanager
async def metrics(**tokens: str) -> AsyncIterator[Accepts]:
    check = ServiceSettings.model_validate(tokens).token_check
    server = start_metrics_server("127.0.0.1", 0, CollectorRegistry(), token_check=check)
    yield lambda token: _answers(f"http://127.0.0.1:{server.server_port}/metrics", token)
    await asyncio.to_thread(server.shutdown)
    server.server_close()


PORTS = (router_calls, router_metrics, worker, metrics)


@pytest.mark.parametrize("port", PORTS)
async def test_port_accepts_both_tokens_and_no_other(port: Any) -> None:
    async with port(**TOKENS) as accepts:
        assert await accepts(FIRST)
        assert await accepts(SECOND)
        for other in OTHERS:
            assert not await accepts(other)
    async with port(cluster_token=SECOND) as accepts:
        assert not await accepts(FIRST)


def test_calls_with_the_second_token_are_counted() -> None:
    registry = CollectorRegistry()
    check = TokenCheck(FIRST, SECOND)
    SecretMetrics(registry).observe([], check)
    for token in (FIRST, SECOND, SECOND, "other"):
        check.accepts(f"Bearer {token}")
    check.accepts_scraper(f"bearer {SECOND}")
    assert registry.get_sample_value("headrace_second_cluster_token_calls_total") == 3


@pytest.mark.parametrize("name", TOKENS)
def test_white_space_around_a_token_is_not_part_of_it(name: str) -> None:
    """A Secret made from a file often ends with a line end, which no header can have."""
    settings = ServiceSettings.model_validate(TOKENS | {name: f" {TOKENS[name]}\n"})
    assert settings.token == FIRST
    assert settings.token_check is not None
    assert all(settings.token_check.accepts(f"Bearer {token}") for token in TOKENS.values())


@pytest.mark.parametrize("name", ["CLUSTER_TOKEN", "SECOND_CLUSTER_TOKEN"])
@pytest.mark.parametrize("token", ["two words", "two\nlines", "tökën"])
def test_token_that_no_header_can_have_is_a_settings_error(
    name: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN", FIRST)
    monkeypatch.setenv(f"HEADRACE_{name}", token)
    with pytest.raises(SettingsError, match=f"^{name.lower()}: must") as caught:
        RouterSettings.load()
    assert token not in str(caught.value)


def test_second_token_needs_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be accepted, but calls without a token would be accepted as well."""
    monkeypatch.setenv("HEADRACE_SECOND_CLUSTER_TOKEN", SECOND)
    with pytest.raises(SettingsError, match="second_cluster_token is set"):
        RouterSettings.load()
    monkeypatch.setenv("HEADRACE_SECOND_CLUSTER_TOKEN", "")
    assert RouterSettings.load().token_check is None
