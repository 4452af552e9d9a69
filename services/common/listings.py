"""Listings of a router: workers, served models and whether requests can be placed.

These are responses of the router's HTTP API, which `services.common.placement` describes.
"""

from typing import Annotated

from pydantic import Field

from services.common.messages import MAX_TOKENS, Address, Count, Epoch, Label, Message, WorkerId
from services.common.placement import Compatibility, ModelInfo, Role


class WorkerView(Message):
    """State of a worker as the router sees it.

    Attributes:
        decodes: on a prefill worker, whether it can also decode prompts that it computes.
        model_info, compatibility: as the worker registered them.
        state: the reported state, or ``suspect``, ``probation`` or ``unmatched``.
        reason: why the worker gets no requests, or fewer than others; None otherwise.
        promised_tokens: number of queued tokens of the promised placements, which the last
            heartbeat does not include.
        pending_prompt_tokens, prompt_tokens_per_s, inter_token_s, kv_raw_bytes, kv_wire_bytes,
            kv_faster_raw_bytes: see `Heartbeat`.
        slowdown: factor by which the worker is slower than the fastest one with its role and model.
        pages_free, promised_pages, pages_total: numbers of free pages, of pages of the promised
            placements, and of all pages, by name of the page group.
        page_bytes: bytes of a page of each page group, by name; see `Registration`.
        silent_s: time since the last heartbeat, seconds.
    """

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: Address
    model: Label
    state: str
    reason: str | None
    queue_tokens: Count
    promised_tokens: Count
    pending_prompt_tokens: Count = 0
    prompt_tokens_per_s: float = 0.0
    inter_token_s: float = 0.0
    slowdown: float = 1.0
    pages_free: dict[Label, Count]
    promised_pages: dict[Label, Count]
    pages_total: dict[Label, Count]
    page_bytes: dict[Label, Count]
    running: Count
    waiting: Count
    kv_raw_bytes: Count = 0
    kv_wire_bytes: Count = 0
    kv_faster_raw_bytes: Count = 0
    silent_s: float
    decodes: bool = False
    model_info: ModelInfo | None = None
    compatibility: Compatibility | None = None


class WorkerList(Message):
    """All registered workers.

    Attributes:
        waiting: number of placement requests in the router's queue.
    """

    workers: list[WorkerView]
    waiting: Count = 0


class ModelList(Message):
    """The served models, one entry for each name."""

    models: list[ModelInfo]


class ModelReadiness(Message):
    """Whether requests for a model can be placed now.

    Attributes:
        reason: why not; None if ``ready``.
        infos: the model as its ready workers registered it, without repetitions.
        context_length: maximum tokens of a prompt and its output on the registered workers: the
            context length of the model, or the number of tokens that fit in their KV pages,
            whichever is smaller; None if no worker or compatible pair is registered, or if the
            router has just started and further workers may register.
    """

    model: Label
    ready: bool
    reason: str | None = None
    infos: list[ModelInfo] = Field(default_factory=list)
    context_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None


class ReadinessList(Message):
    """The registered models, one entry for each name."""

    models: list[ModelReadiness]
