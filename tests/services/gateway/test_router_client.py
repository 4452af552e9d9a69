"""The client of the routers: failover, hung routers, stale connections, timeouts, errors."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.common.errors import (
    InternalFault,
    Overloaded,
    QueueTimeout,
    ServiceError,
    TooLarge,
    Unavailable,
)
from services.common.placement import Outcome, PlaceRequest, Release
from services.gateway import router_client
from services.gateway.router_answers import NoRouter
from services.gateway.router_client import RouterClient
from tests.services.certificates import Authority
from tests.services.gateway.fakes import FakeRouter, FakeWorker, running, until
from tests.services.tls_ports import router_port

REQUEST = PlaceRequest(request_id="r", prompt_tokens=1, max_tokens=1)
UNREGISTERED = "no worker of the model 'small' is registered"
OpenClient = Callable[..., RouterClient]


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    router = FakeRouter([FakeWorker("decode-0")], "small")
    async with running(router):
        yield router


@pytest.fixture
async def open_client() -> AsyncIterator[OpenClient]:
    async with AsyncExitStack() as stack:

        def open_(*urls: str, timeout_s: float = 2.0) -> RouterClient:
            client = RouterClient(list(urls), token="between-us", timeout_s=timeout_s)
            stack.push_async_callback(client.close)
            return client

        yield open_


@pytest.fixture
def unused() -> str:
    """URL of a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def test_second_router_places_if_the_first_is_down(
    router: FakeRouter, open_client: OpenClient, unused: str
) -> None:
    client = open_client(unused, f"{router.url}/")
    with await client.place(REQUEST) as placed:
        assert placed.router == router.url
        assert client._routers == [router.url, unused], "the router that answered is tried first"
        placed.outcome = Outcome.OK
    await until(lambda: bool(router.releases))
    assert router.releases == [
        Release(placement_id=placed.placement.placement_id, outcome=Outcome.OK)
    ]
    assert router.authorizations == {"Bearer between-us"}


async def test_no_reachable_router_is_unavailable(open_client: OpenClient, unused: str) -> None:
    client = open_client(unused)
    with pytest.raises(NoRouter, match="no router is reachable"):
        await client.place(REQUEST)
    assert (await client.readiness("small")).reason == "no router answers"


async def test_readiness_is_that_of_the_first_router_that_is_ready(
    router: FakeRouter, open_client: OpenClient, unused: str
) -> None:
    other = FakeRouter([], "small", not_ready="other reason")
    async with running(other):
        client = open_client(unused, other.url, router.url)
        assert (await client.readiness("small")).ready
        assert client._routers[0] == router.url, "the router that is ready is tried first"
        router.not_ready = "reason"
        assert (await client.readiness("small")).reason == "reason"
        assert (await client.readiness("big")).reason == (
            "no worker of the model 'big' is registered, only of 'small'"
        )


async def test_calls_use_one_connection_and_probes_another(
    router: FakeRouter, open_client: OpenClient
) -> None:
    client = open_client(router.url)
    for _ in range(3):
        await client.place(REQUEST)
    assert len(router.peers) == 1
    for _ in range(3):
        assert (await client.readiness("small")).ready
    assert len(router.peers) == 2


async def test_connection_closed_by_an_idle_router_does_not_fail_a_call(
    router: FakeRouter, open_client: OpenClient
) -> None:
    client = open_client(router.url)
    with await client.place(REQUEST):
        await router.stop()
        await router.start()
    await client.place(REQUEST)
    await until(lambda: router.outstanding == 1)


async def test_call_is_repeated_once_if_its_connection_is_dropped(
    router: FakeRouter, open_client: OpenClient
) -> None:
    client = open_client(router.url)
    await client.place(REQUEST)
    router.drops = 1
    placed = await client.place(REQUEST)
    assert len(router.places) == 3
    assert placed.placement.placement_id == router.places[2].placement_id
    assert len({call.placement_id for call in router.places}) == 3
    router.drops = 2
    with pytest.raises(Unavailable, match="no router is reachable"):
        await client.place(REQUEST)
    assert (len(router.places), router.drops) == (5, 0)


async def test_answer_may_take_the_timeout_and_the_wait(
    router: FakeRouter, open_client: OpenClient
) -> None:
    client = open_client(router.url, timeout_s=1.0)
    router.hold = True
    with pytest.raises(Unavailable):
        await client.place(REQUEST)
    await until(lambda: router.abandoned == 1)
    placing = asyncio.create_task(client.place(REQUEST.model_copy(update={"wait_s": 5.0})))
    await asyncio.sleep(1.2)
    router.hold = False
    await placing


async def test_second_router_places_if_the_first_hangs(
    router: FakeRouter, open_client: OpenClient
) -> None:
    """The kernel accepts connections to a stopped process, so that only an answer is missing."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        client = open_client(f"http://127.0.0.1:{stopped.getsockname()[1]}", router.url)
        async with asyncio.timeout(20):
            placed = await client.place(REQUEST.model_copy(update={"wait_s": 60.0}))
        assert placed.router == router.url
        assert router.places[0].wait_s <= 59.0, "the time that the first router took is deducted"


async def test_router_that_hangs_with_a_queued_call_is_unavailable(
    router: FakeRouter, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "PROBE_PERIOD_S", 0.05)
    client = open_client(router.url, timeout_s=2.0)
    router.hold = True
    placing = asyncio.create_task(client.place(REQUEST.model_copy(update={"wait_s": 60.0})))
    await asyncio.sleep(0.5)
    assert not placing.done(), "probes are answered"
    router.hung = True
    with pytest.raises(NoRouter):
        await asyncio.wait_for(placing, 30)


async def test_queued_calls_keep_their_place_and_share_probes(
    router: FakeRouter, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "PROBE_PERIOD_S", 0.05)
    client = open_client(router.url)
    router.hold = True
    request = REQUEST.model_copy(update={"wait_s": 60.0})
    placing = [asyncio.create_task(client.place(request)) for _ in range(20)]
    await asyncio.sleep(0.5)
    router.hold = False
    await asyncio.gather(*placing)
    assert (len(router.places), router.abandoned) == (20, 0)
    assert 1 <= router.probes <= 20, "not 20 for each period"


async def test_router_that_closes_does_not_hide_a_lack_of_workers(
    router: FakeRouter, open_client: OpenClient
) -> None:
    other = FakeRouter([], "small")
    async with running(other):
        client = open_client(other.url, router.url)
        router.refusals = [(503, "closing")]
        with pytest.raises(Unavailable, match="no_workers") as refused:
            await client.place(REQUEST)
        assert not isinstance(refused.value, NoRouter)


async def test_proxy_of_the_environment_is_not_used(
    router: FakeRouter, open_client: OpenClient, unused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", unused)
    monkeypatch.setenv("http_proxy", unused)
    await open_client(router.url).place(REQUEST)


@pytest.mark.parametrize(
    ("status", "code", "error", "retry_after_s"),
    [
        (408, "queue_timeout", QueueTimeout, None),
        (429, "queue_full", Overloaded, 3.0),
        (413, "too_large", TooLarge, None),
        (503, "no_workers", Unavailable, 3.0),
        (503, "closing", NoRouter, 3.0),
        (503, "starting", NoRouter, 3.0),
        (500, "internal", Unavailable, 3.0),
        (400, "invalid", InternalFault, None),
        (401, "unauthenticated", Unavailable, 1.0),
        (302, "not a code", Unavailable, 1.0),
    ],
)
async def test_refusal_of_a_router_is_a_typed_error(
    router: FakeRouter,
    open_client: OpenClient,
    status: int,
    code: str,
    error: type[ServiceError],
    retry_after_s: float | None,
) -> None:
    router.refusals = [(status, code)]
    with pytest.raises(error) as caught:
        await open_client(router.url).place(REQUEST)
    assert caught.value.retry_after_s == retry_after_s


async def test_reason_for_no_router_includes_a_refused_token(open_client: OpenClient) -> None:
    async with router_port(settings={"cluster_token": "another"}) as port:
        client = open_client(f"http://127.0.0.1:{port}")
        with capture_logs() as logs:
            found = [(await client.readiness("small")).reason for _ in range(2)]
    assert found == ["no router answers: it refuses the cluster token"] * 2
    warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert warnings == ["router does not answer"]


async def test_router_that_refuses_the_token_is_skipped(
    router: FakeRouter, open_client: OpenClient
) -> None:
    async with router_port(settings={"cluster_token": "another"}) as port:
        client = open_client(f"http://127.0.0.1:{port}", router.url)
        with await client.place(REQUEST) as placed:
            assert placed.router == router.url


async def test_reason_for_no_router_includes_the_tls_error(tmp_path: Path) -> None:
    """The gateway refuses the router's certificate, or the router that of the gateway."""
    ours, foreign = Authority(tmp_path / "ours"), Authority(tmp_path / "foreign")
    gateway = ours.tls("gateway")
    async with router_port(ours.tls("router")) as port:

        async def reason() -> str | None:
            client = RouterClient(
                [f"https://127.0.0.1:{port}"], token=None, tls=gateway, timeout_s=5
            )
            with capture_logs() as logs:
                found = [(await client.readiness("small")).reason for _ in range(2)]
            await client.close()
            warnings = [entry for entry in logs if entry["event"] == "router does not answer"]
            assert len(warnings) == (found[0] != UNREGISTERED)  # only once
            assert len(set(found)) == 1
            return found[0]

        assert await reason() == UNREGISTERED
        files = foreign.issue("gateway", into=ours)
        assert await reason() == "no router answers: CERTIFICATE_VERIFY_FAILED"
        files.ca.write_bytes(files.ca.read_bytes() + ours.issue("other").ca.read_bytes())
        assert await reason() == "no router answers: TLSV1_ALERT_UNKNOWN_CA"
