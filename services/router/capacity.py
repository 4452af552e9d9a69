"""Resources that a request needs, and resources of a worker."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from runtime.pages.eviction import evicted_tokens
from runtime.pages.plan import PageCount, PagePlan
from services.common.placement import Compatibility, ModelInfo, PlaceRequest, Role, WorkerState

REUSE = 1.5
"""Number of queued tokens that a cached prompt token outweighs. Tokens that are computed again on
another worker also delay the requests behind, and evict other KV. Measured in BENCHMARKS.md."""


class WorkerHealth(StrEnum):
    """State of a worker as the router sees it. Workers in `USABLE` take requests now or soon.

    Attributes:
        NOT_READY: the worker reports this state, with a reason.
        SUSPECT: the worker has missed heartbeats.
        PROBATION: a request failed on the worker. It gets no requests for a while.
        UNMATCHED: no worker with the other role is compatible with the worker.
    """

    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not_ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    PROBATION = "probation"
    UNMATCHED = "unmatched"


def health_of(state: WorkerState | None, *, is_late: bool, has_failed: bool) -> WorkerHealth:
    """Return the health of a worker, whatever its partners.

    Args:
        state: state of its last heartbeat; None before the first.
        is_late: whether the next heartbeat is overdue.
        has_failed: whether a request has failed on it lately.
    """
    if state is None or state is WorkerState.STARTING:
        return WorkerHealth.STARTING
    if state in (WorkerState.NOT_READY, WorkerState.DRAINING):
        return WorkerHealth(state)
    if is_late:
        return WorkerHealth.SUSPECT
    return WorkerHealth.PROBATION if has_failed else WorkerHealth.READY


READY = frozenset({WorkerHealth.READY, WorkerHealth.UNMATCHED})
"""States in which a worker takes requests. Without a partner, it can serve them only if it is a
prefill worker that decodes."""
USABLE = READY | {WorkerHealth.SUSPECT, WorkerHealth.PROBATION}
REASONS = {
    WorkerHealth.SUSPECT: "its heartbeats are late",
    WorkerHealth.PROBATION: "a request failed on it",
}
"""Reason, in errors, why workers in this state get no requests."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources that a request needs.

    The number of output tokens is unknown in advance. A placement therefore reserves pages for at
    most ``output_reserve`` output tokens of each choice. Otherwise a request without a limit would
    occupy a whole worker. The worker may still refuse the request.

    Attributes:
        prompt_tokens, replayed_tokens: see `PlaceRequest`.
        max_tokens: maximum output tokens of each choice.
        required_tokens: output tokens of each choice that must fit; None: ``max_tokens``.
        may_wait: whether the request may wait in the router's queue.
        prefix: hashes of the beginning of the prompt, see `services.common.prefix_hashes`; empty if
            they are unknown.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    model: str | None = None
    exclude: frozenset[str] = frozenset()
    output_reserve: int = 256
    required_tokens: int | None = None
    may_wait: bool = False
    replayed_tokens: int = 0
    prefix: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls,
        request: PlaceRequest,
        *,
        output_reserve: int,
        may_wait: bool,
        prefix: tuple[bytes, ...] = (),
    ) -> Self:
        """Return the demand of a request to place."""
        return cls(
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            choices=request.choices,
            model=request.model,
            exclude=frozenset(request.exclude),
            output_reserve=output_reserve,
            required_tokens=request.required_tokens,
            may_wait=may_wait,
            replayed_tokens=request.replayed_tokens,
            prefix=prefix,
        )

    @property
    def least_tokens(self) -> int:
        """Output tokens of each choice that must fit."""
        return self.max_tokens if self.required_tokens is None else self.required_tokens

    def choice_tokens(self, max_tokens: int | None = None) -> int:
        """Return the KV tokens of one choice on a decode worker.

        There is no KV of the last output token.

        Args:
            max_tokens: maximum output tokens of each choice; default: those of the request.
        """
        return self.prompt_tokens + min((max_tokens or self.max_tokens) - 1, self.output_reserve)

    @property
    def cost(self) -> int:
        """Tokens that fair queueing counts: the prompt, and the expected output of all choices."""
        return self.prompt_tokens + self.choices * min(self.max_tokens, self.output_reserve)

    def tokens(self, role: Role, max_tokens: int | None = None, *, cached: int = 0) -> int:
        """Return the tokens that the request adds to ``queue_tokens`` of a worker in this role.

        Args:
            max_tokens: maximum output tokens of each choice; default: those of the request.
            cached: prompt tokens that a prefill worker need not compute.
        """
        if role is Role.PREFILL:
            return self.prompt_tokens - cached
        return self.choices * self.choice_tokens(max_tokens)

    def slots(self, role: Role) -> int:
        """Return the batch slots that the request needs on a worker with this role."""
        return 1 if role is Role.PREFILL else self.choices

    def evicted(self, kv_eviction: float, page_size: int) -> int:
        """Return the number of tokens that workers evict. Replayed output is not evicted.

        Args:
            kv_eviction: fraction of the prompt's tokens that is evicted.
        """
        prompt = max(0, self.prompt_tokens - self.replayed_tokens)
        return evicted_tokens(prompt, kv_eviction, page_size)

    def pages(
        self,
        role: Role,
        plan: PagePlan,
        max_tokens: int | None = None,
        *,
        kv_eviction: float = 0.0,
    ) -> PageCount:
        """Return the pages that the request occupies on a worker with this role.

        Args:
            max_tokens: maximum output tokens of each choice; default: those of the request.
            kv_eviction: fraction of the prompt's tokens that is evicted.
        """
        prompt, choices = self.prompt_tokens, self.choices
        evicted = self.evicted(kv_eviction, plan.page_size)
        if role is Role.PREFILL:
            return plan.computed(prompt, evicted)
        length = self.choice_tokens(max_tokens)
        computed = role is Role.COLOCATED
        pages = plan.decode(prompt - evicted, length - evicted, choices=choices, computed=computed)
        if computed and evicted:  # after the whole prompt was computed
            first = plan.admission(
                prompt, limit=length + 1, known=prompt, evicted=evicted, choices=choices
            )
            pages = PageCount(*map(max, pages, first))
        return pages


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """State of a worker at one instant. A promised placement is not in its heartbeats yet.

    Attributes:
        queue_tokens: queued tokens: reported ones plus those of promised placements.
        pending_prompt_tokens: prompt tokens that the worker has not computed yet, including those
            of promised placements.
        max_pending_prompt_tokens: value of `pending_prompt_tokens` from which the worker gets no
            further prompt; None if its prompt tokens per second are unknown.
        slowdown: factor by which the worker is slower than the fastest comparable one; 1 if that is
            unknown or not noticeable.
        pages_total: number of pages of each page group.
        pages_free: reported free pages minus promised ones; may be negative.
        slots: number of batch slots for running, waiting and promised sequences.
        max_slots: number of slots at which the worker counts as full.
        max_running: number of batch slots that the worker has.
        decodes: whether a prefill worker can also decode prompts that it computes.
        overflow_tokens: queued tokens of a decode worker above which prefill workers that decode
            take over requests; None: never.
        last_placement: sequence number of the worker's newest placement; 0 if there is none.
        reason: why the worker gets no requests, if it or the router knows that.
    """

    worker_id: str
    role: Role
    model: ModelInfo
    compatibility: Compatibility
    health: WorkerHealth
    pages_total: PageCount
    queue_tokens: int
    pages_free: PageCount
    slots: int
    max_slots: int
    max_running: int
    decodes: bool = False
    overflow_tokens: int | None = None
    last_placement: int = 0
    reason: str | None = None
    pending_prompt_tokens: int = 0
    max_pending_prompt_tokens: float | None = None
    slowdown: float = 1.0

    def delay(self, demand: Demand, role: Role, cached: int = 0) -> float:
        """Return the delay of a request on this worker, in tokens that a fast worker computes.

        On a worker at full speed, the delay is the number of queued tokens, less `REUSE` times the
        tokens of the prompt that the worker has cached. It may be negative. A slow worker takes
        longer to compute the queued tokens and the request itself.

        The time of decode depends less on the queue. All sequences of a batch advance together, and
        a step takes as long for one sequence as for a partly filled batch. A slow worker therefore
        decodes only if the batches of the other workers are full.

        Args:
            cached: prompt tokens that the worker has cached.
        """
        delay = self.queue_tokens - REUSE * cached
        if self.slowdown == 1.0:
            return delay
        tokens = demand.tokens(role, cached=cached)
        alone = tokens * (1 if role is Role.PREFILL else self.max_running)
        return delay + (self.slowdown - 1) * (self.queue_tokens + alone)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles in which the worker can serve a request."""
        if self.role is Role.PREFILL and self.decodes:
            return Role.PREFILL, Role.COLOCATED
        return (self.role,)

    @property
    def page_plan(self) -> PagePlan:
        """Page plan, which computes the numbers of pages that requests need on the worker."""
        return self.compatibility.page_plan

    @property
    def context_length(self) -> int:
        """Maximum tokens of a prompt and its output: limited by the model and by the pages.

        If tokens of the prompt are evicted, more output may fit.
        """
        return self._longest()

    def _longest(self, evicted: int = 0) -> int:
        """Return the maximum tokens of a choice, including its prompt.

        There is no KV of the last output token.
        """
        kept = self.page_plan.max_tokens(self.pages_total)
        return min(self.compatibility.context_length, kept + 1 + evicted)

    def need(self, demand: Demand, role: Role) -> tuple[int, PageCount]:
        """Return how much output of a request would fit if the worker were idle, and its pages.

        A single choice must fit with all of its output. All choices together must fit with at most
        `Demand.output_reserve` output tokens each, and need one batch slot each.

        Args:
            role: one of the worker's `roles`.

        Returns:
            Output tokens of each choice, at most `Demand.max_tokens`, and the pages of all choices
            with this output. Both are 0 if fewer than `Demand.least_tokens` fit.
        """
        share = self.compatibility.kv_eviction
        evicted = demand.evicted(share, self.page_plan.page_size)
        prefills = role is Role.PREFILL
        longest = self.compatibility.context_length if prefills else self._longest(evicted)
        most = min(demand.max_tokens, longest - demand.prompt_tokens)
        if most < demand.least_tokens or demand.choices > self.max_running:
            return 0, PageCount()

        def pages_for(output: int) -> PageCount:
            return demand.pages(role, self.page_plan, output, kv_eviction=share)

        def exceeds(output: int) -> bool:
            return not pages_for(output).fits(self.pages_total)

        pages = pages_for(most)
        if pages.fits(self.pages_total):
            return most, pages
        fitting = bisect_left(range(demand.least_tokens, most), True, key=exceeds)
        if not fitting:
            return 0, PageCount()
        most = demand.least_tokens + fitting - 1
        return most, pages_for(most)

    @property
    def is_open(self) -> bool:
        """Whether the worker takes requests and has a slot for another sequence."""
        return self.slots < self.max_slots and self.health in READY

    @property
    def has_prompt_backlog(self) -> bool:
        """Whether a worker that computes prompts has too many prompt tokens to get more."""
        limit, tokens = self.max_pending_prompt_tokens, self.pending_prompt_tokens
        return self.role is not Role.DECODE and limit is not None and 0 < tokens >= limit


def with_space(
    workers: Iterable[WorkerSnapshot], demand: Demand, role: Role, need: PageCount
) -> list[WorkerSnapshot]:
    """Return the workers that have enough free pages and batch slots for a request in a role.

    Prompts may wait for pages on a prefill worker, so any worker is returned for `Role.PREFILL`. A
    prefill worker decodes only if it has unused batch slots for all choices.

    Args:
        workers: open workers (`WorkerSnapshot.is_open`).
        need: pages of `WorkerSnapshot.need`.
    """
    if role is Role.PREFILL:
        return list(workers)
    found = list(workers)
    for group, pages in enumerate(need):  # instead of `fits`, which takes most of the time
        found = [worker for worker in found if worker.pages_free[group] >= pages]
    if role is Role.COLOCATED:
        slots = demand.slots(role)
        found = [
            worker
            for worker in found
            if worker.role is not Role.PREFILL or worker.max_running - worker.slots >= slots
        ]
    return found
