"""Workers that fit no other worker: the reason is in the log, the worker list and readiness."""

from typing import Any

import pytest
import structlog

from services.common.placement import Compatibility, Role
from services.router.app import create_app
from services.router.settings import RouterSettings
from tests.services.router.samples import COMPATIBLE, beat, registration

OTHER: dict[str, Any] = {
    "model_hash": "m1",
    "context_length": 4096,
    "kv_format": "fp8",
    "kv_format_hash": "h1",
    "kv_format_version": 2,
    "page_size": 32,
    "codec_version": 2,
    "frame_version": 2,
    "codec": "raw",
    "codebook_id": "b1",
    "kernel_plan_hash": "p1",
    "kv_eviction": 0.5,
}


class _Router:
    def __init__(self) -> None:
        self._client = create_app(RouterSettings.model_validate({})).test_client()

    async def add(self, worker_id: str, role: Role, compatibility: Compatibility) -> None:
        body = registration(worker_id, role, compatibility=compatibility).model_dump(mode="json")
        assert (await self._client.post("/v1/register", json=body)).status_code == 200
        await self._client.post("/v1/heartbeat", json=beat(worker_id).model_dump(mode="json"))

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
    reason = (
        "the workers prefill-0 and decode-0 are not compatible: "
        f"{name} is {getattr(COMPATIBLE, name)!r} and {OTHER[name]!r}"
    )
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
