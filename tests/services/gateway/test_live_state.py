"""The state of the live page: authentication, tenants, content, bounds and shared collection."""

import asyncio
import hashlib
import json
from typing import Any

import pytest

from services.common.listings import WorkerView
from services.common.placement import Role
from services.gateway import live
from services.gateway.keys import ApiKeys, Tenant
from services.gateway.live import MAX_WORKERS, TransferRates
from services.gateway.timeline import MAX_RECENT
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
        "pages_free": 48,
        "promised_pages": 0,
        "pages_total": 64,
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
    assert state["model"] == {"name": model, "context_length": site.router.context_length}
    assert state["router"] == {"waiting": 7}
    assert [w["name"] for w in state["workers"]] == ["d0", "p0"]
    assert (state["workers_total"], state["queue_tokens"]) == (2, 240)
    assert state["workers"][0] == {
        "name": "d0",
        "role": "decode",
        "state": "ready",
        "queue_tokens": 120,
        "running": 3,
        "waiting": 1,
        "kv_usage": 0.25,
        "raw_s": 0,
        "wire_s": 0,
    }
    assert state["kv"] == {"raw_bytes": 130, "wire_bytes": 100, "raw_s": 0, "wire_s": 0}
    assert state["gateway"]["generation_tokens"] == len(site.encode("hello"))
    (request,) = state["requests"]
    assert (request["status"], request["output_tokens"]) == ("ok", len(site.encode("hello")))


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
    assert [r["status"] for r in json.loads(text)["requests"]] == ["running", "ok"]
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
    assert [r["number"] for r in (await state_of(site, "sk-a2"))["requests"]] == [2, 1]
    assert (await state_of(site, "sk-b"))["requests"] == []


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
    site.worker.worker_id, site.router.prefill = "d" * 64, "p" * 64
    site.http.headers["x-request-id"] = "x" * 128
    for _ in range(MAX_RECENT + 3):
        await complete(site)
        for _ in range(8):
            site.gateway.recent.of(None)[0].route()
    response = await site.http.get(STATE)
    state = response.json()
    assert len(state["workers"]) == MAX_WORKERS
    assert state["workers"][-1]["name"] == "z"
    assert (state["workers_total"], state["queue_tokens"]) == (1001, 1001 * 120)
    assert [r["number"] for r in state["requests"]] == list(range(MAX_RECENT + 3, 3, -1))
    assert len(response.content) < 64 << 10


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
        assert rates.update([view("a", kv_raw_bytes=900, kv_wire_bytes=700, silent_s=0.1)], 10) == [
            (0, 0)
        ]
        after = view("a", kv_raw_bytes=1900, kv_wire_bytes=1500, silent_s=0.3)
        (measured,) = rates.update([after], 11.2)  # 1.0 s between the heartbeats
        assert measured == pytest.approx((1000, 800))

    def test_same_heartbeat_keeps_the_rate(self) -> None:
        rates = TransferRates()
        rates.update([view("a", silent_s=0)], 1)
        for now, silent_s in ((2.0, 0.0), (2.1, 0.1), (2.2, 0.25), (3.0, 1.01)):
            (measured,) = rates.update([view("a", kv_raw_bytes=10, silent_s=silent_s)], now)
            assert measured == pytest.approx((10, 0))

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
        assert rates.update([second], now) == [(0, 0)]
