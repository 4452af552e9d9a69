"""The state of the live page: authentication, tenants, content, bounds and shared collection."""

import asyncio
import hashlib
import json
from typing import Any

import pytest

from runtime.pages.plan import PagePlan
from services.common.listings import WorkerView
from services.common.placement import Compatibility, Role
from services.gateway import live
from services.gateway.keys import ApiKeys, Tenant
from services.gateway.live import MAX_WORKERS, TransferRates, TransferredKV
from services.gateway.recent import MAX_ENDED, MAX_RUNNING
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import hang, say, until

STATE = "/page/state"


def view(worker_id: str, role: Role = Role.DECODE, **changes: Any) -> WorkerView:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "epoch": "e1",
        "role": role,
        "address": "10.9.8.7:6543",
        "model": "SmolLM2-135M-Instruct",
        "state": "ready",
        "reason": None,
        "queue_tokens": 100,
        "promised_tokens": 20,
        "pages_free": {"kv": 48},
        "promised_pages": {"kv": 0},
        "pages_total": {"kv": 64},
        "page_bytes": {"kv": 4096},
        "running": 3,
        "waiting": 1,
        "silent_s": 0.1,
    }
    return WorkerView(**(fields | changes))


async def state_of(site: Site, key: str | None = None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = await site.http.get(STATE, headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def complete(site: Site, key: str | None = None, **fields: Any) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = await site.http.post(
        "/v1/completions", json={"prompt": "x", **fields}, headers=headers
    )
    assert response.status_code == 200, response.text


async def test_state_describes_workers_router_and_requests(site: Site) -> None:
    model = site.model.name
    site.router.views = [
        view("p0", Role.PREFILL, model=model, kv_raw_bytes=130, kv_wire_bytes=100),
        view("d0", model=model, kv_raw_bytes=130, kv_wire_bytes=100),
        view("other", model="another-model"),
    ]
    site.router.waiting = 7
    site.worker.script = say(*site.encode("hello"))
    await complete(site)
    state = await state_of(site)
    length = site.router.context_length
    described = {"name": model, "context_length": length, "generates": True}
    assert (state["model"], state["encoder"]) == (described, None)
    assert state["router"] == {"waiting": 7}
    assert [w["name"] for w in state["workers"]] == ["d0", "p0"]
    assert (state["workers_total"], state["queue_tokens"]) == (2, 240)
    assert state["workers"][0] == {
        "name": "d0",
        "role": "decode",
        "state": "ready",
        "kv_format": None,
        "kv_eviction": 0.0,
        "queue_tokens": 120,
        "running": 3,
        "waiting": 1,
        "kv_usage": 0.25,
        "wire_s": 0,
    }
    assert state["kv"] == {
        "raw_bytes": 130,
        "wire_bytes": 100,
        "raw_s": 0,
        "wire_s": 0,
        "faster_raw_share": 0.0,
        "compressible": False,
    }
    assert state["gateway"]["generation_tokens"] == len(site.encode("hello"))
    (request,) = state["requests"]["ended"]
    assert (request["status"], request["output_tokens"]) == ("ok", len(site.encode("hello")))


def compatibility(**changes: Any) -> Compatibility:
    fields: dict[str, Any] = dict.fromkeys(Compatibility.model_fields, "x")
    versions = ("kv_format_version", "codec_version", "frame_version", "protocol")
    numbers = (*versions, "context_length", "chunk_tokens")
    others = {"kv_eviction": 0, "eos_token_ids": (), "page_plan": PagePlan(16)}
    return Compatibility(**fields | dict.fromkeys(numbers, 1) | others | changes)


async def test_state_has_the_kv_format_of_each_worker_and_the_version(site: Site) -> None:
    formats = {"d0": compatibility(kv_format="fp8"), "d1": compatibility(kv_eviction=0.25)}
    site.router.views = [
        view(name, model=site.model.name, compatibility=of) for name, of in formats.items()
    ]
    state = await state_of(site)
    shown = [(worker["kv_format"], worker["kv_eviction"]) for worker in state["workers"]]
    assert shown == [("fp8", 0.0), ("x", 0.25)]
    assert state["gateway"]["version"] == (await site.http.get("/version")).json()["version"]


async def test_state_shows_the_use_of_the_fullest_page_group(site: Site) -> None:
    total = {"full": 64, "near": 10, "far": 20}
    site.router.views = [
        view(
            "d0",
            model=site.model.name,
            pages_total=total,
            page_bytes=dict.fromkeys(total, 4096),
            pages_free={"full": 64, "near": 4, "far": 15},
            promised_pages=dict.fromkeys(total, 0),
        )
    ]
    (worker,) = (await state_of(site))["workers"]
    assert worker["kv_usage"] == 0.6


async def test_state_says_which_share_of_the_kv_is_sent_raw_because_that_is_faster(
    site: Site,
) -> None:
    common: dict[str, Any] = {
        "model": site.model.name,
        "compatibility": compatibility(codec="splitzip"),
        "kv_raw_bytes": 1000,
        "kv_wire_bytes": 990,
    }
    site.router.views = [
        view("p0", Role.PREFILL, **common, kv_faster_raw_bytes=970),
        view("d0", **common),
    ]
    kv = (await state_of(site))["kv"]
    assert (kv["faster_raw_share"], kv["compressible"]) == (0.97, True)


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, (False, True)), ({"metrics_port": 9100}, (False, False))]
)
async def test_state_says_what_example_code_and_links_need(
    open_site: OpenSite, settings: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    site: Site = await open_site(**settings)
    found = (await state_of(site))["gateway"]
    assert (found["requires_key"], found["serves_metrics"]) == expected
    assert (await site.http.get("/metrics")).status_code == (200 if expected[1] else 404)


async def test_state_has_no_prompt_no_output_and_no_address(site: Site) -> None:
    reason = "no route to 10.9.8.7:6543"
    site.router.views = [view("d0", model=site.model.name, state="not_ready", reason=reason)]
    site.worker.script = say(*site.encode(" unmistakable output"))
    await complete(site, prompt="a confidential prompt")
    site.worker.script = hang
    waiting = asyncio.create_task(
        site.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "a confidential chat"}]},
        )
    )
    await site.router.started(2)
    text = json.dumps(await state_of(site))
    requests = json.loads(text)["requests"]
    listed = requests["running"] + requests["ended"]
    assert [request["status"] for request in listed] == ["running", "ok"]
    port = str(site.worker.port)
    for secret in ("confidential", "unmistakable", "10.9.8.7", "127.0.0.1", port, site.router.url):
        assert secret not in text
    waiting.cancel()


async def test_state_needs_a_key_and_shows_requests_of_its_tenant_only(open_site: OpenSite) -> None:
    tenants = {"sk-a": Tenant("a"), "sk-a2": Tenant("a"), "sk-b": Tenant("b")}
    keys = ApiKeys({hashlib.sha256(k.encode()).digest(): t for k, t in tenants.items()})
    site: Site = await open_site(keys=keys)
    site.worker.script = say(*site.encode("hello"))
    await complete(site, "sk-a")
    await complete(site, "sk-a", prompt="two words")
    for headers in ({}, {"authorization": "Bearer wrong"}):
        response = await site.http.get(STATE, headers=headers)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert (await site.http.get(f"{STATE}?key=sk-a")).status_code == 401
    of_a, of_b = [(await state_of(site, key))["requests"] for key in ("sk-a2", "sk-b")]
    assert [request["number"] for request in of_a["ended"]] == [2, 1]
    assert of_b == {"running": [], "running_total": 0, "ended": [], "unplaced": []}


async def test_many_viewers_share_one_call_of_the_router(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 3600.0)
    for _ in range(2):
        states = await asyncio.gather(*(state_of(site) for _ in range(50)))
        assert site.router.listings == 1
        assert len({state["gateway"]["id"] for state in states}) == 1


async def test_state_is_not_stored_and_answers_while_draining(site: Site) -> None:
    site.gateway.draining = True
    response = await site.http.get(STATE)
    assert response.headers["cache-control"] == "no-store"
    assert response.json()["not_ready"] == "draining"


async def test_state_without_a_router_has_no_workers(site: Site) -> None:
    await site.router.stop()
    state = await state_of(site)
    assert (state["router"], state["workers"]) == (None, [])
    assert state["not_ready"] == "no router answers"


async def test_state_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are not ready are listed even if there are more than `MAX_WORKERS`."""
    monkeypatch.setattr(live, "PERIOD_S", 0.0)
    many = [view(f"w{i:063}", model=site.model.name) for i in range(1000)]
    site.router.views = [*many, view("z", model=site.model.name, state="suspect")]
    site.worker.script = say(*site.encode("hello"))
    site.worker.worker_id = "d" * 64
    site.router.prefill = "p" * 64
    site.http.headers["x-request-id"] = "x" * 128
    for _ in range(MAX_ENDED + 1):
        await complete(site)
    site.worker.script = hang
    started = len(site.worker.streams)
    running = [asyncio.create_task(complete(site)) for _ in range(MAX_RUNNING + 1)]
    await site.router.started(started + MAX_RUNNING + 1)
    kept = site.gateway.recent.of(None)
    for timeline in (*kept.ended, *kept.running.values()):
        for _ in range(8):
            timeline.route()
    response = await site.http.get(STATE)
    state = response.json()
    assert len(state["workers"]) == MAX_WORKERS
    assert state["workers"][-1]["name"] == "z"
    assert (state["workers_total"], state["queue_tokens"]) == (1001, 1001 * 120)
    assert len(state["requests"]["ended"]) == MAX_ENDED
    assert len(state["requests"]["running"]) == MAX_RUNNING
    assert state["requests"]["running_total"] == MAX_RUNNING + 1
    assert len(response.content) < 64 << 10
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_cancelled_viewer_does_not_block_the_next_one(site: Site) -> None:
    site.router.hung = True
    viewer = asyncio.create_task(site.http.get(STATE))
    await until(lambda: site.router.listings > 0, limit_s=10)
    viewer.cancel()
    site.router.hung = False
    assert (await state_of(site))["router"] == {"waiting": 0}


class TestTransferRates:
    def test_rate_is_measured_between_heartbeats(self) -> None:
        rates = TransferRates()
        first = view("a", kv_raw_bytes=900, kv_wire_bytes=700, silent_s=0.1)
        assert rates.update([first], 10) == [TransferredKV()]
        after: dict[str, Any] = {"kv_raw_bytes": 1900, "kv_wire_bytes": 1500}
        after["kv_faster_raw_bytes"] = 600
        # 1.0 s between the heartbeats
        (measured,) = rates.update([view("a", **after, silent_s=0.3)], 11.2)
        assert measured == pytest.approx(TransferredKV(1000, 800, 600))

    def test_same_heartbeat_keeps_the_rate(self) -> None:
        rates = TransferRates()
        rates.update([view("a", silent_s=0)], 1)
        for now, silent_s in ((2.0, 0.0), (2.1, 0.1), (2.2, 0.25), (3.0, 1.01)):
            (measured,) = rates.update([view("a", kv_raw_bytes=10, silent_s=silent_s)], now)
            assert measured == pytest.approx(TransferredKV(10))

    @pytest.mark.parametrize(
        ("second", "now"),
        [
            (view("a", epoch="e2", kv_raw_bytes=99, silent_s=0), 2),  # restarted
            (view("a", kv_raw_bytes=99, silent_s=0), 60),  # the last state is 59 s old
            (view("a", kv_raw_bytes=99, silent_s=3), 4.5),  # no heartbeats
        ],
    )
    def test_unknown_rate_is_zero(self, second: WorkerView, now: float) -> None:
        rates = TransferRates()
        rates.update([view("a", silent_s=0)], 1)
        assert rates.update([second], now) == [TransferredKV()]
