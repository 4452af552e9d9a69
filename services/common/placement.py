"""The router's HTTP API: what workers tell it, what gateways ask it, what it answers.

All bodies are JSON, each the model of this module that the table names. Where a cluster token is
configured, everything under ``/v1`` needs ``Authorization: Bearer <cluster token>``.

==========================  ====================  =============================================
``POST /v1/register``       `Registration`        200 ``{}``; 409 `STALE_EPOCH`
``POST /v1/heartbeat``      `Heartbeat`           200 `HeartbeatReply`; 409 `STALE_EPOCH`
``POST /v1/deregister``     `Deregistration`      200 ``{}``
``POST /v1/place``          `PlaceRequest`        200 `Placement`; 404, 408, 413, 429, 503
``POST /v1/release``        `Release`             200 ``{}``, also where the placement is unknown
``GET /v1/workers``         –                     200 `WorkerList`
``GET /v1/models``          –                     200 `ModelList`
``GET /health``, ``/ready``, ``/metrics``         open to all
==========================  ====================  =============================================

Any refusal has a `RouterError` body: 400 names the field that is wrong, 401 the token; 429 and 503
carry ``Retry-After`` in seconds.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS = 1 << 31  # of one request or one queue
MAX_PAGES = 1 << 31
MAX_ADMITTED = 8192  # placement ids in one heartbeat
MAX_EXCLUDED = 64

WorkerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Epoch = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
PlacementId = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
Address = Annotated[
    str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$", max_length=261)
]
Label = Annotated[str, Field(max_length=256)]
Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Pages = Annotated[int, Field(ge=0, le=MAX_PAGES)]
Sequences = Annotated[int, Field(ge=0, le=1 << 20)]
Count = Annotated[int, Field(ge=0)]  # a sum of bounded figures


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Role(StrEnum):
    """What a worker computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class WorkerState(StrEnum):
    """What a worker says of itself; only a ready one is given requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Outcome(StrEnum):
    """How a placed request ended."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class ErrorCode(StrEnum):
    """What a client of the router can act on."""

    INVALID = "invalid"  # 400
    UNAUTHENTICATED = "unauthenticated"  # 401
    UNKNOWN_MODEL = "unknown_model"  # 404
    NOT_FOUND = "not_found"  # 404, 405: no such path or method
    QUEUE_TIMEOUT = "queue_timeout"  # 408
    STALE_EPOCH = "stale_epoch"  # 409: a newer life of this worker is known
    TOO_LARGE = "too_large"  # 413: no worker can ever hold it
    QUEUE_FULL = "queue_full"  # 429
    INTERNAL = "internal"  # 500
    NO_WORKERS = "no_workers"  # 503


class ModelInfo(_Message):
    """The model that a worker serves; ``context_length`` in tokens."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    context_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    eos_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64)] = ()
    model_hash: Label


class Compatibility(_Message):
    """What two workers must agree on, in every field, before KV passes between them."""

    model_hash: Label
    kv_format: Label
    kv_format_hash: Label
    kv_format_version: Annotated[int, Field(ge=0, le=1 << 16)]
    page_size: Annotated[int, Field(ge=1, le=4096)]  # tokens
    codec_version: Annotated[int, Field(ge=0, le=1 << 16)]
    codec: Label  # what it understands: "raw", or "splitzip" and raw
    codebook_id: Label
    kernel_plan_hash: Label

    def mismatches(self, other: "Compatibility") -> list[str]:
        """The names of the fields that differ; empty where the two can work together."""
        return [
            name for name in type(self).model_fields if getattr(self, name) != getattr(other, name)
        ]


class Registration(_Message):
    """A worker's introduction, once for each epoch and whenever a router asks again."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: Address  # of its gRPC port
    model: ModelInfo
    compatibility: Compatibility
    page_size: Annotated[int, Field(ge=1, le=4096)]  # tokens
    pages_total: Annotated[int, Field(ge=1, le=MAX_PAGES)]
    max_running: Annotated[int, Field(ge=1, le=1 << 20)]  # sequences in one batch


class Heartbeat(_Message):
    """A worker's load at one instant.

    ``queue_tokens`` is, for prefill, the prompt tokens accepted and not yet computed; for decode,
    the tokens resident in pages plus those of sequences that wait for pages. ``running`` counts
    seats of the batch, one for each choice, ``waiting`` requests without a seat. ``admitted`` lists
    the placements that these figures have come to include; a worker repeats an id until one
    heartbeat that carried it was answered.
    """

    worker_id: WorkerId
    epoch: Epoch
    state: WorkerState
    queue_tokens: Tokens
    pages_free: Pages
    running: Sequences
    waiting: Sequences
    admitted: Annotated[list[PlacementId], Field(max_length=MAX_ADMITTED)] = []
    reason: Annotated[str, Field(max_length=512)] | None = None  # why it is not ready


class HeartbeatReply(_Message):
    """``register_again``: the router does not know this worker, having restarted or given it up."""

    register_again: bool = False


class Deregistration(_Message):
    """A worker's farewell: this epoch will take no more requests."""

    worker_id: WorkerId
    epoch: Epoch


class PlaceRequest(_Message):
    """A request that needs workers. A larger ``priority`` goes first; ``wait_s`` bounds the wait in
    the router's queue (0: answer at once)."""

    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
    attempt: Annotated[int, Field(ge=0, le=1000)] = 0
    model: Annotated[str, Field(max_length=256)] | None = None  # None: the only one served
    prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]  # output, of each choice
    choices: Annotated[int, Field(ge=1, le=1024)] = 1
    tenant: Annotated[str, Field(max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    exclude: Annotated[list[WorkerId], Field(max_length=MAX_EXCLUDED)] = []
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 0.0


class WorkerAddress(_Message):
    """One life of one worker, and where it listens."""

    worker_id: WorkerId
    epoch: Epoch
    address: Address


class Placement(_Message):
    """Where a request goes. A colocated worker is ``decode`` alone, and ``prefill`` is None."""

    placement_id: PlacementId
    prefill: WorkerAddress | None
    decode: WorkerAddress


class Release(_Message):
    """A placed request ended; ``blame`` names the worker of the placement that failed it."""

    placement_id: PlacementId
    outcome: Outcome
    blame: WorkerId | None = None


class WorkerView(_Message):
    """A worker as the router sees it. ``state`` is the worker's own state while it is heard and
    trusted, else ``suspect`` or ``probation``; ``promised_*`` are of placements that its last
    heartbeat did not include."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: Address
    model: Label
    state: str
    reason: str | None
    queue_tokens: Count
    promised_tokens: Count
    pages_free: Count
    promised_pages: Count
    pages_total: Count
    running: Count
    waiting: Count
    silent_s: float  # since the last heartbeat


class WorkerList(_Message):
    """All workers that are not gone."""

    workers: list[WorkerView]


class ModelList(_Message):
    """Each model that some worker serves, once for each name."""

    models: list[ModelInfo]


class RouterErrorDetail(_Message):
    code: ErrorCode
    message: str


class RouterError(_Message):
    """The body of every refusal."""

    error: RouterErrorDetail
