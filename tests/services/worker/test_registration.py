"""Heartbeats: one at a time per router, with each placement reported once."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from runtime.engine import Add, Cancel
from services.common.placement import PROTOCOL, Registration, Role, WorkerState
from services.common.tls import MutualTls
from services.transfer.drift import Escapes
from services.transfer.metrics import TransferMetrics
from services.transfer.policy import WireMode
from services.worker import registrar as registrars
from services.worker.engine_thread import EngineThread
from services.worker.registration import Registrar
from tests.runtime.tiny import engine_of, request_of, tiny_model
from tests.services.certificates import Authority
from tests.services.tls_ports import router_port
from tests.services.workers import LIMIT_S, load, until

URL = "http://router"


class Router:
    """Answers registrations at once, and heartbeats when the test allows it.

    Attributes:
        reply: the answers to heartbeats.
    """

    def __init__(self) -> None:
        self.reply: dict[str, Any] = {}
        self.beats: asyncio.Queue[tuple[dict[str, Any], asyncio.Event]] = asyncio.Queue()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/heartbeat":
            answered = asyncio.Event()
            self.beats.put_nowait((json.loads(request.content), answered))
            await answered.wait()
            return httpx.Response(200, json=self.reply)
        return httpx.Response(200, json={})

    async def next(self) -> tuple[dict[str, Any], asyncio.Event]:
        return await asyncio.wait_for(self.beats.get(), LIMIT_S)


@pytest.fixture
async def engine() -> AsyncIterator[EngineThread]:
    thread = EngineThread(engine_of(tiny_model()), on_output=print, on_fault=print)
    thread.start()
    yield thread
    await thread.stop()


def registrar_of(
    engine: EngineThread,
    router: Router,
    monkeypatch: pytest.MonkeyPatch,
    transfers: TransferMetrics | None = None,
) -> Registrar:
    client = httpx.AsyncClient(transport=httpx.MockTransport(router.answer))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client)
    transfers = transfers or TransferMetrics(CollectorRegistry())
    return Registrar(introduction_of(engine), engine, [URL], transfers, token=None)


def introduction_of(engine: EngineThread, heartbeat_s: float = 60.0) -> Registration:
    identity = load().identity
    return Registration(
        protocol=PROTOCOL,
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        role=Role.DECODE,
        address="127.0.0.1:1",
        model=identity.model,
        compatibility=identity.compatibility,
        pages_total=identity.compatibility.page_plan.by_name(engine.pages_total),
        page_bytes={"kv": 4096},
        max_running=16,
        max_waiting=16,
        heartbeat_s=heartbeat_s,
    )


async def test_concurrent_heartbeats_report_each_placement_once(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draining sends a heartbeat while the periodic one is in flight."""
    router = Router()
    registrar = registrar_of(engine, router, monkeypatch)

    async def admit(placement: str) -> None:
        engine.submit(Cancel(placement))
        registrar.admit(placement)
        await engine.run(lambda _: None)

    await admit("a")
    await admit("b")
    registrar.start()
    first, first_answered = await router.next()
    await admit("c")
    draining = asyncio.create_task(registrar.drain())
    await asyncio.sleep(0.05)  # without the lock, the second heartbeat would be sent as well
    first_answered.set()
    second, second_answered = await router.next()
    second_answered.set()
    await draining
    last = asyncio.create_task(registrar.drain())
    third, third_answered = await router.next()
    third_answered.set()
    await last
    assert [beat["admitted"] for beat in (first, second, third)] == [["a", "b"], ["c"], []]
    assert (first["state"], second["state"]) == (WorkerState.READY, WorkerState.DRAINING)
    await registrar.stop()


async def test_placement_is_reported_with_the_first_load_that_includes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine takes a command some time after its submission."""
    engine = EngineThread(engine_of(tiny_model()), on_output=print, on_fault=print)
    router = Router()
    registrar = registrar_of(engine, router, monkeypatch)
    reported = []

    async def beat() -> None:
        draining = asyncio.create_task(registrar.drain())
        heartbeat, answered = await router.next()
        answered.set()
        await draining
        reported.append(heartbeat["admitted"])

    engine.submit(Cancel("a"))
    registrar.admit("a")
    await beat()  # the thread has not been started
    engine.start()
    await engine.run(lambda _: None)
    await beat()
    await engine.stop()
    engine.submit(Cancel("b"))
    registrar.admit("b")
    await beat()
    assert reported == [[], ["a"], []]
    await registrar.stop()


async def test_placements_dropped_during_a_heartbeat_do_not_hide_later_ones(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrars, "MAX_ADMITTED", 2)
    router = Router()
    registrar = registrar_of(engine, router, monkeypatch)

    async def admit(*placements: str) -> None:
        for placement in placements:
            engine.submit(Cancel(placement))
            registrar.admit(placement)
        await engine.run(lambda _: None)

    await admit("a", "b")
    reported = []
    for later in (["c"], []):
        beat = asyncio.create_task(registrar.drain())
        heartbeat, answered = await router.next()
        await admit(*later)
        answered.set()
        await beat
        reported.append(heartbeat["admitted"])
    assert reported == [["a", "b"], ["c"]]
    await registrar.stop()


async def test_placements_computed_here_are_repeated_until_a_router_answers(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrars, "MAX_ADMITTED", 3)
    router = Router()
    registrar = registrar_of(engine, router, monkeypatch)
    registrar.computed_here("a")
    registrar.computed_here("b")
    reported = []
    for later, is_answered in (("c", False), ("d", True), ("e", True), (None, True)):
        beat = asyncio.create_task(registrar.drain())
        heartbeat, answered = await router.next()
        if later:
            registrar.computed_here(later)
        if is_answered:
            answered.set()
        else:
            beat.cancel()
        await asyncio.wait([beat])
        reported.append("".join(heartbeat["computed_here"]))
    assert reported == ["ab", "abc", "d", "e"], "'a' was dropped while it was reported"
    await registrar.stop()


async def test_worker_says_how_a_router_refused_it(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(401, text="the cluster token is missing or wrong")

    router = Router()
    monkeypatch.setattr(router, "answer", refuse)
    registrar = registrar_of(engine, router, monkeypatch)
    registrar.start()
    expected = f"not registered: {URL}: HTTP status 401: the cluster token is missing or wrong"
    await until(lambda: registrar.unregistered == expected)
    await registrar.stop()


@pytest.mark.parametrize(("heartbeat_s", "refused"), [(1.0, False), (1.1, True)])
async def test_worker_with_rare_heartbeats_is_refused_with_the_reason(
    engine: EngineThread, heartbeat_s: float, refused: bool
) -> None:
    """Routers suspect a worker after 2 s without a heartbeat, by default."""
    async with router_port() as port:
        url = f"http://127.0.0.1:{port}"
        introduction = introduction_of(engine, heartbeat_s)
        transfers = TransferMetrics(CollectorRegistry())
        registrar = Registrar(introduction, engine, [url], transfers, token=None)
        registrar.start()
        reason = "heartbeat_s is 1.1, but at most half of suspect_after_s (2)"
        await until(lambda: not refused or reason in str(registrar.unregistered))
        await until(lambda: refused or registrar.unregistered is None)
        await registrar.stop()


async def test_heartbeat_has_the_kv_bytes_sent_so_far(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router()
    transfers = TransferMetrics(CollectorRegistry())
    registrar = registrar_of(engine, router, monkeypatch, transfers)
    registrar.start()
    first, answered = await router.next()
    answered.set()
    for _ in range(2):
        transfers.encoded(WireMode.RAW, 100, 80, Escapes(0, 0, 0.0), 0.1, raw_is_faster=True)
    draining = asyncio.create_task(registrar.drain())
    second, answered = await router.next()
    answered.set()
    await draining
    names = ("kv_raw_bytes", "kv_wire_bytes", "kv_faster_raw_bytes")
    totals = [tuple(beat[name] for name in names) for beat in (first, second)]
    assert totals == [(0, 0, 0), (200, 160, 200)]
    await registrar.stop()


async def test_worker_that_is_not_ready_reports_the_reason(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router()
    registrar = registrar_of(engine, router, monkeypatch)
    registrar.not_ready = "no landing slots"
    registrar.start()
    first, answered = await router.next()
    answered.set()
    draining = asyncio.create_task(registrar.drain())
    second, answered = await router.next()
    answered.set()
    await draining
    assert (first["state"], first["reason"]) == (WorkerState.NOT_READY, "no landing slots")
    assert second["state"] == WorkerState.DRAINING
    await registrar.stop()


async def test_worker_says_why_no_router_knows_it_until_it_has_a_valid_certificate(
    engine: EngineThread, tmp_path: Path
) -> None:
    """The router ends the connection with a TLS alert, after the handshake of the client."""
    ours, foreign = Authority(tmp_path / "ours"), Authority(tmp_path / "foreign")
    files = foreign.issue("worker")
    files.ca.write_bytes(files.ca.read_bytes() + ours.issue("router").ca.read_bytes())
    async with router_port(MutualTls(ours.files("router"))) as port:
        url = f"https://127.0.0.1:{port}"
        registrar = Registrar(
            introduction_of(engine, heartbeat_s=0.01),
            engine,
            [url],
            TransferMetrics(CollectorRegistry()),
            token=None,
            tls=MutualTls(files),
        )
        assert registrar.unregistered == f"not registered: {url}: not contacted yet"
        registrar.start()
        async with asyncio.timeout(LIMIT_S):
            await until(lambda: "UNKNOWN_CA" in str(registrar.unregistered))
            assert f"not registered: {url}" in str(registrar.unregistered)
            ours.issue("worker", into=foreign)
            await until(lambda: registrar.unregistered is None)
        await registrar.stop()


async def test_heartbeat_has_the_pace_of_recent_steps(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router()
    registrar = registrar_of(engine, router, monkeypatch)

    async def beat() -> dict[str, Any]:
        draining = asyncio.create_task(registrar.drain())
        heartbeat, answered = await router.next()
        answered.set()
        await draining
        return heartbeat

    assert ((first := await beat())["pace"], first["inter_token_s"]) == (None, 0.0)
    engine.submit(Add(request_of("r", 20, 10)))
    await until(lambda: engine.load.steps >= 10 and not engine.load.running)
    second = await beat()
    pace = second["pace"]
    assert pace["step_s"] == pytest.approx(second["inter_token_s"], rel=0.5)
    assert 1 <= pace["tokens"] <= 20 <= pace["context"] <= 30
    await registrar.stop()


async def test_worker_that_every_router_calls_unmatched_has_the_reason(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, dict[str, Any]] = {"a": {"unmatched": "kv_format differs"}, "b": {}}

    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=answers[request.url.host])

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client)
    registrar = Registrar(
        introduction_of(engine, heartbeat_s=0.001),
        engine,
        ["http://a", "http://b"],
        TransferMetrics(CollectorRegistry()),
        token=None,
    )
    registrar.start()
    await until(lambda: registrar.unregistered is None)
    assert registrar.unmatched is None, "the other router has a partner"
    answers["b"] = answers["a"]
    await until(lambda: registrar.unmatched == "kv_format differs")
    answers["b"] = {}
    await until(lambda: registrar.unmatched is None)
    await registrar.stop()


async def test_stop_ends_heartbeats_whose_client_loses_a_cancellation(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """anyio before 4.16 loses one if it cancels a scope of its own at the same time."""
    router = Router()
    lost = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        try:
            return await router.answer(request)
        except asyncio.CancelledError:
            if lost.is_set():
                raise
            lost.set()
            return httpx.Response(200, json={})

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client)
    transfers = TransferMetrics(CollectorRegistry())
    registrar = Registrar(introduction_of(engine), engine, [URL], transfers, token=None)
    registrar.start()
    await router.next()
    await asyncio.wait_for(registrar.stop(), LIMIT_S)
    assert lost.is_set()
