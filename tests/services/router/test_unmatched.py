"""Workers that fit no other worker: they learn it, and so do operators and gateways."""

from typing import Any

import pytest
import structlog
from quart import Response

from runtime.pages.plan import PagePlan
from services.common.placement import Compatibility, Role
from services.router.app import create_app
from services.router.settings import RouterSettings
from tests.services.router.samples import COMPATIBLE, beat, place_request, registration

OTHER: dict[str, Any] = {
    "model_hash": "m1",
    "context_length": 4096,
    "eos_token_ids": (0, 2),
    "kv_format": "fp8",
    "kv_format_hash": "h1",
    "kv_format_version": 2,
    "page_plan": PagePlan(32),
    "codec_version": 2,
    "frame_version": 2,
    "protocol": 2,
    "codec": "raw",
    "codebook_id": "b1",
    "kernel_plan_hash": "p1",
    "chunk_tokens": 256,
    "kv_eviction": 0.5,
}


class _Router:
    def __init__(self) -> None:
        self._client = create_app(RouterSettings.model_validate({})).test_client()

    async def add(
        self, worker_id: str, role: Role, compatibility: Compatibility, **changes: Any
    ) -> None:
        worker = registration(worker_id, role, compatibility=compatibility, **changes)
        body = worker.model_dump(mode="json")
        assert (await self._client.post("/v1/register", json=body)).status_code == 200
        await self.beat(worker_id)

    async def beat(self, worker_id: str) -> str | None:
        """Send a heartbeat, and return why the worker has no partner."""
        body = beat(worker_id).model_dump(mode="json")
        answer = await (await self._client.post("/v1/heartbeat", json=body)).get_json()
        reason: str | None = answer["unmatched"]
        return reason

    async def remove(self, worker_id: str) -> None:
        body = {"worker_id": worker_id, "epoch": "e1"}
        await self._client.post("/v1/deregister", json=body)

    async def number(self, role: Role, state: str) -> float:
        """Return the number of workers with a role and a state, from the metrics."""
        text = await (await self._client.get("/metrics")).get_data(as_text=True)
        name = f'headrace_router_workers{{role="{role}",state="{state}"}} '
        (line,) = (line for line in text.splitlines() if line.startswith(name))
        return float(line.removeprefix(name))

    async def post(self, path: str, body: dict[str, Any]) -> Response:
        return await self._client.post(path, json=body)

    async def get(self, path: str) -> Any:
        return await (await self._client.get(path)).get_json()

    async def reasons(self) -> dict[str, str | None]:
        listed = (await self.get("/v1/workers"))["workers"]
        return {worker["worker_id"]: worker["reason"] for worker in listed}


def test_all_properties_are_varied() -> None:
    assert set(OTHER) == set(Compatibility.model_fields)


@pytest.mark.parametrize("name", OTHER)
async def test_pair_that_differs_in_one_property_is_refused_with_the_reason(name: str) -> None:
    router = _Router()
    different = COMPATIBLE.model_copy(update={name: OTHER[name]})
    await router.add("prefill-0", Role.PREFILL, COMPATIBLE)
    with structlog.testing.capture_logs() as logs:
        await router.add("decode-0", Role.DECODE, different)
    values = f"{getattr(COMPATIBLE, name)!r} and {OTHER[name]!r}"
    if name == "page_plan":
        values = "16 tokens per page and 32 tokens per page"
    if name == "chunk_tokens":
        values += " (start both with the same chunk_tokens; auto depends on step_tokens)"
    reason = f"the workers prefill-0 and decode-0 are not compatible: {name} is {values}"
    assert [entry["reason"] for entry in logs if entry["log_level"] == "warning"] == [reason]
    assert await router.reasons() == {"prefill-0": reason, "decode-0": reason}
    (model,) = (await router.get("/v1/readiness"))["models"]
    assert (model["ready"], model["reason"]) == (False, reason)


async def test_worker_beside_a_pair_has_the_reason_and_the_model_is_ready() -> None:
    router = _Router()
    await router.add("prefill-0", Role.PREFILL, COMPATIBLE)
    await router.add("decode-0", Role.DECODE, COMPATIBLE)
    await router.add("decode-1", Role.DECODE, COMPATIBLE.model_copy(update={"codec": "raw"}))
    reasons = await router.reasons()
    assert (reasons["prefill-0"], reasons["decode-0"]) == (None, None)
    assert "codec is 'splitzip' and 'raw'" in (reasons["decode-1"] or "")
    (model,) = (await router.get("/v1/readiness"))["models"]
    assert model["ready"]


async def test_worker_without_a_partner_is_told_so_and_counted_until_one_registers() -> None:
    router = _Router()
    other = COMPATIBLE.model_copy(update={"kv_format": "fp8"})
    await router.add("prefill-0", Role.PREFILL, COMPATIBLE)
    await router.add("decode-0", Role.DECODE, COMPATIBLE)
    await router.add("decode-1", Role.DECODE, other)
    assert await router.beat("decode-0") is None
    assert "kv_format is 'dense' and 'fp8'" in (await router.beat("decode-1") or "")
    for state in ("ready", "unmatched"):
        assert await router.number(Role.DECODE, state) == 1
    await router.add("prefill-1", Role.PREFILL, other)
    assert await router.beat("decode-1") is None
    assert await router.number(Role.DECODE, "ready") == 2
    await router.remove("prefill-1")
    assert await router.beat("decode-1") is not None
    assert await router.number(Role.DECODE, "unmatched") == 1


async def test_worker_is_not_unmatched_while_no_worker_with_the_other_role_is_registered() -> None:
    router = _Router()
    await router.add("decode-0", Role.DECODE, COMPATIBLE)
    await router.add("decode-1", Role.DECODE, COMPATIBLE.model_copy(update={"kv_format": "fp8"}))
    assert await router.beat("decode-0") is None
    assert await router.beat("decode-1") is None


async def test_prefill_worker_that_decodes_serves_without_a_partner_but_has_the_state() -> None:
    router = _Router()
    other = COMPATIBLE.model_copy(update={"kv_format": "fp8"})
    await router.add("prefill-0", Role.PREFILL, COMPATIBLE, decodes=True)
    await router.add("decode-0", Role.DECODE, other)
    assert await router.number(Role.PREFILL, "unmatched") == 1
    (model,) = (await router.get("/v1/readiness"))["models"]
    assert model["ready"]
    body = place_request().model_dump(mode="json")
    answer = await (await router.post("/v1/place", body)).get_json()
    assert answer["decode"]["worker_id"] == "prefill-0"


async def test_model_of_a_worker_without_a_partner_does_not_make_gateways_unready() -> None:
    """Gateways compare their tokenizer with the models of the workers that serve requests."""
    router = _Router()
    other = COMPATIBLE.model_copy(update={"model_hash": "m1"})
    await router.add("prefill-0", Role.PREFILL, COMPATIBLE)
    await router.add("decode-0", Role.DECODE, COMPATIBLE)
    await router.add("decode-1", Role.DECODE, other)
    (model,) = (await router.get("/v1/readiness"))["models"]
    assert [info["model_hash"] for info in model["infos"]] == ["m0"]
