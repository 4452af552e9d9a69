"""Sample workers and requests for the tests of the router."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypeGuard

from runtime.pages.plan import PageCount, PagePlan
from services.common.placement import (
    PROTOCOL,
    Compatibility,
    Heartbeat,
    ModelInfo,
    PlaceRequest,
    Registration,
    Role,
    WorkerState,
)
from services.common.router_errors import ErrorCode
from services.router import policy as policies
from services.router.capacity import (
    Demand,
    WorkerHealth,
    WorkerSnapshot,
    with_space,
)
from services.router.choice import PolicyName
from services.router.errors import Refusal
from services.router.policy import Pair
from services.router.roster import Claim, Reason, Roster

COMPATIBLE = Compatibility(
    model_hash="m0",
    context_length=1 << 20,
    kv_format="dense",
    kv_format_hash="",
    kv_format_version=1,
    page_plan=PagePlan(16),
    codec_version=1,
    frame_version=1,
    codec="splitzip",
    codebook_id="b0",
    kernel_plan_hash="p0",
    chunk_tokens=512,
)


def registration(
    worker_id: str,
    role: Role,
    *,
    epoch: str = "e1",
    model: str = "small",
    pages_total: int | PageCount = 64,
    max_running: int = 8,
    max_waiting: int = 256,
    compatibility: Compatibility = COMPATIBLE,
    decodes: bool = False,
    overflow_tokens: int | None = None,
    reuses_prefixes: bool = True,
) -> Registration:
    return Registration(
        protocol=PROTOCOL,
        worker_id=worker_id,
        epoch=epoch,
        role=role,
        address="127.0.0.1:5000",
        model=model_info(model, compatibility),
        compatibility=compatibility,
        pages_total=by_group(compatibility.page_plan, pages_total),
        page_bytes=dict.fromkeys((group.name for group in compatibility.page_plan.groups), 1 << 16),
        max_running=max_running,
        max_waiting=max_waiting,
        heartbeat_s=0.25,
        decodes=decodes,
        overflow_tokens=overflow_tokens,
        reuses_prefixes=reuses_prefixes,
    )


def model_info(name: str, compatibility: Compatibility = COMPATIBLE) -> ModelInfo:
    return ModelInfo(
        name=name,
        context_length=compatibility.context_length,
        vocab_size=49152,
        max_logprobs=20,
        eos_token_ids=compatibility.eos_token_ids,
        model_hash=compatibility.model_hash,
    )


def worker(worker_id: str, role: Role, queue_tokens: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=worker_id,
        role=role,
        model=model_info("small"),
        compatibility=COMPATIBLE,
        health=WorkerHealth.READY,
        pages_total=PageCount(64),
        queue_tokens=queue_tokens,
        pages_free=PageCount(64),
        slots=0,
        max_slots=8,
        max_running=4,
    )


def by_group(plan: PagePlan, pages: int | PageCount) -> dict[str, int]:
    """Return numbers of pages by the name of their group; a single number is for all groups."""
    return plan.by_name(plan.each(pages) if isinstance(pages, int) else pages)


def beat(
    worker_id: str,
    *,
    pages_free: int | PageCount = 64,
    plan: PagePlan = COMPATIBLE.page_plan,
    **changes: Any,
) -> Heartbeat:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "epoch": "e1",
        "state": WorkerState.READY,
        "queue_tokens": 0,
        "pages_free": by_group(plan, pages_free),
        "running": 0,
        "waiting": 0,
    }
    return Heartbeat(**(fields | changes))


def place_request(prompt_tokens: int = 17, max_tokens: int = 16, **changes: Any) -> PlaceRequest:
    return PlaceRequest(
        **({"request_id": "r"} | changes), prompt_tokens=prompt_tokens, max_tokens=max_tokens
    )


def is_refusal(answer: object, code: ErrorCode) -> TypeGuard[Refusal]:
    """Return whether the answer to a call is the refusal with this code."""
    return isinstance(answer, Refusal) and answer.code is code


def has_capacity(worker: WorkerSnapshot, demand: Demand, role: Role) -> bool:
    """Return whether a request fits on a worker now, in one of its roles."""
    output = worker.need(demand, role)[0]
    need = demand.pages(role, worker.page_plan, output)
    takes = worker.is_open and not worker.has_prompt_backlog
    return bool(takes and output and with_space([worker], demand, role, need))


def place(
    demand: Demand,
    workers: Sequence[WorkerSnapshot],
    policy: PolicyName,
    rng: Random,
    *,
    reserved: frozenset[str] = frozenset(),
    queued: int = 0,
    cached: Mapping[str, int] = policies.NOTHING_CACHED,
) -> Pair | Claim:
    """Return the pair that is chosen among workers, or the claim that says why there is none."""
    roster = Roster()
    for worker in workers:
        roster.update(worker)
    claim = roster.claim(demand)
    if claim.reason is not Reason.BUSY:
        return claim
    pair = policies.place(
        demand, claim.pools, policy, rng, reserved=reserved, queued=queued, cached=cached
    )
    return pair or claim
