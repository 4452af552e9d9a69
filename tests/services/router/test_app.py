"""The router's HTTP API without a socket: statuses, headers, bodies, disconnects."""

import asyncio
from typing import Any, NoReturn

import pytest
from pydantic import ValidationError

from services.common.placement import (
    Deregistration,
    Outcome,
    Placement,
    Release,
    Role,
)
from services.common.router_errors import ErrorCode
from tests.services.router.app import HEADERS, Router, code_of, until
from tests.services.router.samples import beat, place_request, registration


async def test_pair_is_placed_and_released(router: Router) -> None:
    await router.join("p0", Role.PREFILL)
    await router.join("d0", Role.DECODE)
    status, body, _ = await router.post("/v1/place", place_request())
    placement = Placement.model_validate(body)
    assert status == 200
    assert placement.prefill is not None
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p0", "d0")
    assert (placement.decode.epoch, placement.decode.address) == ("e1", "127.0.0.1:5000")
    release = Release(placement_id=placement.placement_id, outcome=Outcome.OK)
    for _ in range(2):
        assert (await router.post("/v1/release", release))[:2] == (200, {})
    workers = await (await router.client.get("/v1/workers", headers=HEADERS)).get_json()
    assert [w["promised_tokens"] for w in workers["workers"]] == [0, 0]


async def test_router_that_cannot_answer_waiting_calls_is_not_healthy(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(now: float) -> NoReturn:
        raise RuntimeError("a bug")

    async def until(status: int) -> dict[str, str]:
        async with asyncio.timeout(10):
            while (answer := await router.client.get("/health")).status_code != status:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        body: dict[str, str] = await answer.get_json()
        return body

    assert await until(200) == {"status": "ok"}
    with monkeypatch.context() as patched:
        patched.setattr(router.dispatcher, "advance", fail)
        assert "RuntimeError('a bug')" in (await until(503))["reason"]
    assert await until(200) == {"status": "ok"}


async def test_colocated_worker_is_placed_as_decode_without_prefill(router: Router) -> None:
    await router.join("c0", Role.COLOCATED)
    status, body, _ = await router.post("/v1/place", place_request())
    assert (status, body["prefill"], body["decode"]["worker_id"]) == (200, None, "c0")
    registered = registration("c0", Role.COLOCATED).model_dump(mode="json")
    assert body["model"] == registered["model"]
    workers = await (await router.client.get("/v1/workers", headers=HEADERS)).get_json()
    worker = workers["workers"][0]
    assert worker["model_info"] == registered["model"]
    assert worker["compatibility"] == registered["compatibility"]


async def test_workers_list_has_transferred_bytes_and_waiting_calls(router: Router) -> None:
    moved = {"kv_raw_bytes": 130, "kv_wire_bytes": 100, "kv_faster_raw_bytes": 20}
    await router.join("p0", Role.PREFILL, **moved)
    await router.join("d0", Role.DECODE, pages_free=0)
    call = asyncio.create_task(router.post("/v1/place", place_request(wait_s=5)))
    await router.until_waiting(1)
    listed = await (await router.client.get("/v1/workers", headers=HEADERS)).get_json()
    prefill = next(w for w in listed["workers"] if w["worker_id"] == "p0")
    assert {name: prefill[name] for name in moved} == moved
    assert listed["waiting"] == 1
    call.cancel()
    for bytes_ in (-1, 1 << 63):
        with pytest.raises(ValidationError):
            beat("p0", kv_wire_bytes=bytes_)


async def test_heartbeat_of_unknown_worker_registers_again_and_of_replaced_epoch_is_409(
    router: Router,
) -> None:
    assert (await router.post("/v1/heartbeat", beat("d0")))[1] == {
        "register_again": True,
        "unmatched": None,
    }
    await router.join("d0", Role.DECODE)
    await router.post("/v1/register", registration("d0", Role.DECODE, epoch="e2"))
    for path, body in (
        ("heartbeat", beat("d0")),
        ("register", registration("d0", Role.DECODE)),
    ):
        status, answer, _ = await router.post(f"/v1/{path}", body)
        assert (status, code_of(answer)) == (409, ErrorCode.STALE_EPOCH)


async def test_deregistered_worker_gets_no_requests(router: Router) -> None:
    await router.join("c0", Role.COLOCATED)
    goodbye = Deregistration(worker_id="c0", epoch="e1")
    assert (await router.post("/v1/deregister", goodbye))[0] == 200
    status, body, headers = await router.post("/v1/place", place_request(wait_s=60))
    assert (status, code_of(body)) == (503, ErrorCode.NO_WORKERS)
    assert headers["Retry-After"] == "7"


@pytest.mark.parametrize(
    ("request_changes", "status", "code"),
    [
        ({"model": "absent"}, 404, ErrorCode.UNKNOWN_MODEL),
        ({"exclude": ["c0"]}, 503, ErrorCode.NO_WORKERS),
        ({"prompt_tokens": 64 * 16}, 413, ErrorCode.TOO_LARGE),
        ({"choices": 64}, 413, ErrorCode.TOO_LARGE),
    ],
)
async def test_unplaceable_request_is_refused(
    router: Router, request_changes: dict[str, Any], status: int, code: ErrorCode
) -> None:
    await router.join("c0", Role.COLOCATED)
    got, body, headers = await router.post("/v1/place", place_request(**request_changes))
    assert (got, code_of(body)) == (status, code)
    assert ("Retry-After" in headers) == (status == 503)


async def test_retry_after_of_429_is_the_predicted_wait(router: Router) -> None:
    await router.join("c0", Role.COLOCATED, pages_free=0)
    waiting = asyncio.create_task(router.post("/v1/place", place_request(wait_s=60)))
    await router.until_waiting(1)
    router.clock.now += 2.5
    await router.join("c0", Role.COLOCATED, pages_free=0)
    status, body, headers = await router.post("/v1/place", place_request(wait_s=60))
    assert (status, code_of(body)) == (429, ErrorCode.QUEUE_FULL)
    assert headers["Retry-After"] == "3", "the other call has waited for 2.5 s"
    await router.join("c0", Role.COLOCATED, pages_free=64)
    assert (await waiting)[0] == 200


async def test_full_queue_is_429_and_long_wait_is_408(router: Router) -> None:
    await router.join("c0", Role.COLOCATED, pages_free=0)
    calls = [
        asyncio.create_task(router.post("/v1/place", place_request(wait_s=30))) for _ in range(2)
    ]
    await router.until_waiting(2)
    status, body, headers = await router.post("/v1/place", place_request(wait_s=30))
    assert (status, code_of(body)) == (429, ErrorCode.QUEUE_FULL)
    assert headers["Retry-After"] == "7"
    router.clock.now += 9
    await router.join("c0", Role.COLOCATED, pages_free=2)
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert [call.result()[0] for call in done] == [200]
    for _ in range(3):
        router.clock.now += 7
        await router.post("/v1/heartbeat", beat("c0", pages_free=0))
    status, body, headers = await waiting.pop()
    assert (status, code_of(body)) == (408, ErrorCode.QUEUE_TIMEOUT)
    assert "Retry-After" not in headers


async def test_disconnected_caller_is_removed_from_the_queue(router: Router) -> None:
    await router.join("c0", Role.COLOCATED, pages_free=0)
    body = place_request(wait_s=30).model_dump_json().encode()
    async with router.client.request("/v1/place", method="POST", headers=HEADERS) as connection:
        await connection.send(body)
        await connection.send_complete()
        await router.until_waiting(1)
        await connection.disconnect()
        await router.until_waiting(0)
    await router.post("/v1/heartbeat", beat("c0", pages_free=2))
    assert (await router.post("/v1/place", place_request()))[0] == 200, (
        "the cancelled call used no capacity"
    )
    metrics = await (await router.client.get("/metrics", headers=HEADERS)).get_data(as_text=True)
    assert 'headrace_router_placements_total{outcome="abandoned"} 1.0' in metrics
    assert "headrace_router_requests_waiting 0.0" in metrics


async def test_closing_refuses_queued_calls(router: Router) -> None:
    await router.join("c0", Role.COLOCATED, pages_free=0)
    call = asyncio.create_task(router.post("/v1/place", place_request(wait_s=30)))
    await router.until_waiting(1)
    assert (await router.client.get("/ready")).status_code == 200
    router.dispatcher.close()
    assert (await call)[0] == 503
    not_ready = await router.client.get("/ready")
    assert (not_ready.status_code, not_ready.headers["Retry-After"]) == (503, "7")
    assert (await router.client.get("/health")).status_code == 200


async def test_models_and_metrics(router: Router) -> None:
    await router.join("p0", Role.PREFILL, queue_tokens=5)
    await router.join("d0", Role.DECODE, queue_tokens=7)
    await router.post("/v1/place", place_request())
    models = await (await router.client.get("/v1/models", headers=HEADERS)).get_json()
    assert [model["name"] for model in models["models"]] == ["small"]
    text = await (await router.client.get("/metrics", headers=HEADERS)).get_data(as_text=True)
    for line in (
        'headrace_router_workers{role="decode",state="ready"} 1.0',
        'headrace_router_queue_tokens{role="prefill",worker="p0"} 22.0',
        'headrace_router_queue_tokens{role="decode",worker="d0"} 39.0',
        'headrace_router_requests_total{endpoint="/v1/place",status="200"} 1.0',
        'headrace_router_placements_total{outcome="placed"} 1.0',
        "headrace_router_place_seconds_count 1.0",
    ):
        assert line in text
    await router.post("/v1/deregister", Deregistration(worker_id="p0", epoch="e1"))
    text = await (await router.client.get("/metrics", headers=HEADERS)).get_data(as_text=True)
    assert 'worker="p0"' not in text, "a removed worker has no series"


async def test_silent_worker_is_removed_without_any_call(router: Router) -> None:
    await router.join("c0", Role.COLOCATED)
    router.clock.now += 10.1
    await until(lambda: not router.dispatcher.fleet.models())
