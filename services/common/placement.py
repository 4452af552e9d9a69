"""Messages of the router's HTTP API.

All bodies are JSON. The table lists, for each route, the classes of the request body and of the
response body; those of the lists are in `services.common.listings`. If a cluster token is
configured, requests under ``/v1`` and of ``/metrics`` need ``Authorization: Bearer <cluster
token>``. With mutual TLS, every connection needs a certificate.

==========================  ====================  =============================================
``POST /v1/register``       `Registration`        200 ``{}``; 409 `STALE_EPOCH`
``POST /v1/heartbeat``      `Heartbeat`           200 `HeartbeatReply`; 409 `STALE_EPOCH`
``POST /v1/deregister``     `Deregistration`      200 ``{}``
``POST /v1/place``          `PlaceRequest`        200 `Placement`; 404, 408, 409, 413, 429, 503
``POST /v1/release``        `Release`             200 ``{}``, also if the placement is unknown
``GET /v1/workers``         –                     200 `WorkerList`
``GET /v1/models``          –                     200 `ModelList`
``GET /v1/readiness``       –                     200 `ReadinessList`
``GET /metrics``, ``/health``, ``/ready``         the last two need no token
==========================  ====================  =============================================

Calls for encoder workers are in `services.common.encoder_placement`.

A placement request may have the header `services.common.prefix_hashes.HEADER` with hashes of the
beginning of its prompt.

The body of an error is a `services.common.router_errors.RouterError`. If the status is 400, its
message names the invalid field.
Responses with status 429 or 503 have a ``Retry-After`` header in seconds.
"""

from enum import StrEnum
from functools import cached_property
from typing import Annotated, Self
from uuid import uuid4

from pydantic import AfterValidator, Field, model_validator

from runtime.pages.plan import PageCount, PagePlan
from services.common.messages import (
    MAX_ADMITTED,
    MAX_CHOICES,
    MAX_EXCLUDED,
    MAX_PRIORITY,
    MAX_STEP_S,
    MAX_TOKENS,
    MAX_WAIT_S,
    MAX_WEIGHT,
    Address,
    Bytes,
    BytesByGroup,
    Epoch,
    Label,
    Message,
    PagesByGroup,
    PlacementId,
    QueueTokens,
    Sequences,
    TokenIds,
    WorkerId,
)

PROTOCOL = 6
"""Version of the messages between workers and routers, and between workers. Increase it with each
change of them."""


def same_protocol(version: int) -> int:
    """Return the protocol version of a worker.

    Raises:
        ValueError: it is not `PROTOCOL`.
    """
    if version != PROTOCOL:
        raise ValueError(
            f"this router registers workers of protocol version {PROTOCOL}, and the worker has "
            f"version {version}: both must be of the same release"
        )
    return version


def new_placement_id() -> str:
    """Return a random placement id."""
    return uuid4().hex


class Role(StrEnum):
    """Phases that a worker computes: prefill, decode, or both (colocated)."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class WorkerState(StrEnum):
    """State that a worker reports. Only ready workers receive requests."""

    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not_ready"
    DRAINING = "draining"


class Outcome(StrEnum):
    """Result of a placed request."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class ModelInfo(Message):
    """The model that a worker serves.

    Attributes:
        context_length: maximum number of tokens of a prompt and its output. The worker that loads
            the model computes it; no other service derives it from the model's files.
        max_logprobs: maximum alternatives for each token in log probabilities.
        eos_token_ids: tokens that end the output, in rising order: those of the model's files, and
            of its tokenizer's. Gateways send them with every request.
        tokenizer_hash: `TokenizerIdentity.hash`; empty if the model's files have no tokenizer.
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    context_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    max_logprobs: Annotated[int, Field(ge=0, le=1 << 24)]
    eos_token_ids: TokenIds = ()
    model_hash: Label
    tokenizer_hash: Label = ""


class Compatibility(Message):
    """Properties that must be equal on two workers that exchange KV.

    Attributes:
        protocol: `PROTOCOL` of the worker.
        page_plan: page size and page groups, by which every process counts a worker's pages.
        chunk_tokens: maximum prompt tokens of one sequence in a step. No worker needs the value of
            another one to read its KV. But a decode worker computes the tokens of a preempted
            sequence again, and with chunks of another size the results may differ in rounding.
        codec: "raw", or "splitzip" if the worker supports both.
        kv_eviction: fraction of a prompt's tokens that the workers evict.
    """

    model_hash: Label
    context_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    eos_token_ids: TokenIds = ()
    kv_format: Label
    kv_format_hash: Label
    kv_format_version: Annotated[int, Field(ge=0, le=1 << 16)]
    page_plan: PagePlan
    codec_version: Annotated[int, Field(ge=0, le=1 << 16)]
    frame_version: Annotated[int, Field(ge=0, le=1 << 16)]
    codec: Label
    codebook_id: Label
    kernel_plan_hash: Label
    chunk_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    kv_eviction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    protocol: Annotated[int, Field(ge=0, le=1 << 16)] = PROTOCOL

    def mismatches(self, other: "Compatibility") -> list[str]:
        """Return the names of the fields that differ; empty if the workers are compatible."""
        return [
            name for name in type(self).model_fields if getattr(self, name) != getattr(other, name)
        ]


_SHARED = ModelInfo.model_fields.keys() & Compatibility.model_fields.keys()
"""Facts that gateways need to know, and that must be equal on two workers."""


class Registration(Message):
    """Registration of a worker: once per epoch, and again when a router requests it.

    Attributes:
        protocol: `PROTOCOL` of the worker; 1 for workers of releases that did not send it.
        address: host and port of the gRPC server.
        pages_total: number of pages of each page group, by name.
        page_bytes: bytes of a page of each page group, by name, summed over planes and ranks.
        max_running: number of batch slots.
        max_waiting: maximum number of requests without a batch slot; the worker refuses more.
        heartbeat_s: time between two heartbeats, seconds. A router refuses workers that it would
            suspect between two of them.
        decodes: on a prefill worker, whether it can also decode prompts that it computes. Its
            address then serves the decode service too. Ignored for other roles.
        overflow_tokens: on a decode worker, number of queued tokens above which prefill workers
            with ``decodes`` take over requests; None: never. Ignored for other roles.
        reuses_prefixes: whether prompts that start alike reuse KV on the worker.
    """

    protocol: Annotated[int, AfterValidator(same_protocol)] = Field(1, validate_default=True)
    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: Address
    model: ModelInfo
    compatibility: Compatibility
    pages_total: PagesByGroup
    page_bytes: BytesByGroup
    max_running: Annotated[int, Field(ge=1, le=1 << 20)]
    max_waiting: Annotated[int, Field(ge=1, le=1 << 20)]
    heartbeat_s: Annotated[float, Field(gt=0, le=60)]
    decodes: bool = False
    overflow_tokens: QueueTokens | None = None
    reuses_prefixes: bool = False

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> Self:
        for name in sorted(_SHARED):
            if getattr(self.model, name) != getattr(self.compatibility, name):
                raise ValueError(f"{name} of the model is not that of the compatibility")
        if not all(self.page_count):
            raise ValueError("a page group has no pages")
        self.compatibility.page_plan.count(self.page_bytes)  # raises if it has other groups
        return self

    @cached_property
    def page_count(self) -> PageCount:
        """Numbers of pages of the worker.

        Raises:
            ValueError: ``pages_total`` does not have the groups of the plan.
        """
        return self.compatibility.page_plan.count(self.pages_total)

    @cached_property
    def worker(self) -> "WorkerAddress":
        """Id, epoch and address of the worker."""
        return WorkerAddress(worker_id=self.worker_id, epoch=self.epoch, address=self.address)


class StepPace(Message):
    """Means over the recent steps of a worker, by which routers compare the speed of workers.

    Attributes:
        step_s: duration of a step, seconds.
        tokens: number of tokens that it computed.
        context: sum over these tokens of the number of tokens that each attended to.
        idle_s: time since the last step, seconds; 0 while the worker computes.
    """

    step_s: Annotated[float, Field(gt=0, le=MAX_STEP_S)]
    tokens: Annotated[float, Field(gt=0, le=MAX_TOKENS)]
    context: Annotated[float, Field(gt=0, le=MAX_TOKENS**2)]
    idle_s: Annotated[float, Field(ge=0)] = 0.0


class Heartbeat(Message):
    """Load of a worker at one instant.

    Attributes:
        queue_tokens: on a prefill worker, number of accepted prompt tokens that are not computed
            yet; on a decode worker, number of tokens of all sequences, with or without KV pages. A
            prefill worker that decodes adds the tokens of all sequences that it decodes.
        pending_prompt_tokens: number of accepted prompt tokens that the worker has yet to compute.
        prompt_tokens_per_s: prompt tokens that it computed per second lately; 0 if that is unknown.
        inter_token_s: mean duration of recent steps with running sequences, which is the time
            between two tokens of a sequence, seconds; 0 if that is unknown.
        pace: means over recent steps; None if that is unknown.
        pages_free: number of free pages of each page group, by name.
        running: number of occupied batch slots; each choice occupies one.
        waiting: number of requests without a batch slot.
        kv_raw_bytes: bytes of KV that were sent or received since the start, counted as in pages.
        kv_wire_bytes: the same bytes as they were sent, raw or compressed.
        kv_faster_raw_bytes: on a prefill worker, those of ``kv_raw_bytes`` that were not compressed
            because that was faster on the link.
        admitted: ids of the placements that this load includes for the first time. A worker repeats
            an id until the router answers a heartbeat that contains it.
        computed_here: on a decode worker, ids of the placements whose prompts it computes itself,
            so that their prefill workers will not get them; repeated like those in ``admitted``.
        postponed: on a decode worker, ids of the placements whose prefill workers are asked later,
            because pages are not free or the decode worker may compute the prompt; repeated
            likewise.
        ended: ids of the placements whose streams have ended on this worker; repeated likewise. The
            gateway may not have released them, because it has ended, or could not reach this
            router.
        reason: why the worker is not ready.
    """

    worker_id: WorkerId
    epoch: Epoch
    state: WorkerState
    queue_tokens: QueueTokens
    pending_prompt_tokens: QueueTokens = 0
    prompt_tokens_per_s: Annotated[float, Field(ge=0)] = 0.0
    inter_token_s: Annotated[float, Field(ge=0)] = 0.0
    pace: StepPace | None = None
    pages_free: PagesByGroup
    running: Sequences
    waiting: Sequences
    kv_raw_bytes: Bytes = 0
    kv_wire_bytes: Bytes = 0
    kv_faster_raw_bytes: Bytes = 0
    admitted: Annotated[list[PlacementId], Field(max_length=MAX_ADMITTED)] = Field(
        default_factory=list
    )
    computed_here: Annotated[list[PlacementId], Field(max_length=MAX_ADMITTED)] = Field(
        default_factory=list
    )
    postponed: Annotated[list[PlacementId], Field(max_length=MAX_ADMITTED)] = Field(
        default_factory=list
    )
    ended: Annotated[list[PlacementId], Field(max_length=MAX_ADMITTED)] = Field(
        default_factory=list
    )
    reason: Annotated[str, Field(max_length=512)] | None = None


class HeartbeatReply(Message):
    """Answer to a heartbeat.

    Attributes:
        register_again: whether the worker is not registered.
        unmatched: why no other worker can serve requests together with this one, or None.
    """

    register_again: bool = False
    unmatched: str | None = None


class Deregistration(Message):
    """Deregistration of a worker. This epoch of the worker accepts no more requests."""

    worker_id: WorkerId
    epoch: Epoch


class QueuedRequest(Message):
    """Fields of a placement request that the router's queues use.

    Attributes:
        placement_id: id of the placement, a new one for each call. The caller chooses it, so that
            it can release a placement without having received the answer.
        admitted: whether the request was admitted before, because it is repeated or another of
            its prompts was placed. It then waits until its deadline, however long the queue is.
        attempt: number of earlier attempts of the prompt.
        tenant: id of the owner of the API key; None if there are no keys.
        weight: share of the tenant in the placed tokens, relative to other tenants.
        priority: of the requests of a tenant, those with larger values are placed first.
        exclude: ids of workers that must not be used.
        wait_s: maximum time in the router's queue, seconds; 0 means not to wait.
    """

    placement_id: PlacementId = Field(default_factory=new_placement_id)
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
    admitted: bool = False
    attempt: Annotated[int, Field(ge=0, le=1000)] = 0
    tenant: Annotated[str, Field(max_length=128)] | None = None
    weight: Annotated[int, Field(ge=1, le=MAX_WEIGHT)] = 1
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    exclude: Annotated[list[WorkerId], Field(max_length=MAX_EXCLUDED)] = Field(default_factory=list)
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0

    @property
    def urgency(self) -> tuple[bool, int]:
        """Sort key among the requests of a tenant: repeated ones first, then by priority.

        The further prompts of a client request are not preferred. They would otherwise delay all
        other requests of the tenant until the last one is placed.
        """
        return self.attempt == 0, -self.priority


class PlaceRequest(QueuedRequest):
    """A request to place on workers that generate text.

    Attributes:
        model: name of the model; None selects the only served model.
        prompt_tokens: number of tokens of the prompt, including the output of an earlier attempt
            that is replayed after it.
        replayed_tokens: number of tokens of that output, which are never evicted.
        max_tokens: maximum output tokens of each choice.
        required_tokens: output tokens of each choice for which the workers must have space; None:
            ``max_tokens``. The placement says how many fit.
    """

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    replayed_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    required_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    choices: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1


class WorkerAddress(Message):
    """Id, epoch and address of a worker."""

    worker_id: WorkerId
    epoch: Epoch
    address: Address


class Placement(Message):
    """Workers chosen for a request.

    If one worker computes both phases, it is ``decode``, and ``prefill`` is None. It is a colocated
    worker, or a prefill worker that decodes.

    Attributes:
        max_tokens: output tokens of each choice that fit, at most those of the request.
        model: model of the decode worker, as it registered it.
    """

    placement_id: PlacementId
    prefill: WorkerAddress | None
    decode: WorkerAddress
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    model: ModelInfo


class Release(Message):
    """End of a placed request. ``blame`` is the id of the worker that failed, if any.

    It may arrive before the call to place the request, which is refused then.
    """

    placement_id: PlacementId
    outcome: Outcome
    blame: WorkerId | None = None
