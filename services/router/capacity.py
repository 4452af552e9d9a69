"""Resources that a request needs, and those that a worker has."""

from dataclasses import dataclass
from enum import StrEnum

from services.common.placement import Compatibility, Role


class WorkerHealth(StrEnum):
    """State of a worker as the router sees it. Workers in `USABLE` take requests now or soon."""

    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not_ready"  # reported by the worker, with a reason
    DRAINING = "draining"
    SUSPECT = "suspect"  # missed heartbeats
    PROBATION = "probation"  # failed a request; gets no requests for a while


USABLE = frozenset({WorkerHealth.READY, WorkerHealth.SUSPECT, WorkerHealth.PROBATION})


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources that a request needs.

    The number of output tokens is unknown in advance. Placement counts at most ``output_reserve``
    tokens for each choice, so that a request without a limit does not occupy a whole worker. The
    worker itself may still refuse the request.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    model: str | None = None
    exclude: frozenset[str] = frozenset()
    output_reserve: int = 256

    @property
    def choice_tokens(self) -> int:
        """KV tokens of one choice on a decode worker. KV of the last output token is not stored."""
        return self.prompt_tokens + min(self.max_tokens - 1, self.output_reserve)

    def tokens(self, role: Role) -> int:
        """Return the tokens that the request adds to the queue of a worker with this role."""
        return self.prompt_tokens if role is Role.PREFILL else self.choices * self.choice_tokens

    def slots(self, role: Role) -> int:
        """Return the batch slots that the request needs on a worker with this role."""
        return 1 if role is Role.PREFILL else self.choices

    def pages(self, role: Role, page_size: int) -> int:
        """Return the free pages needed to start. Choices share the full pages of the prompt."""
        if role is Role.PREFILL:
            return -(-self.prompt_tokens // page_size)
        shared = self.prompt_tokens // page_size
        return shared + self.choices * (-(-self.choice_tokens // page_size) - shared)

    def min_pages(self, role: Role, page_size: int) -> int:
        """Return the larger of `pages` and the pages of one choice with ``max_tokens`` tokens."""
        if role is Role.PREFILL:
            return self.pages(role, page_size)
        whole = -(-(self.prompt_tokens + self.max_tokens - 1) // page_size)
        return max(whole, self.pages(role, page_size))


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """State of a worker at one instant, including promised placements.

    Attributes:
        queue_tokens: queued tokens: reported ones plus those of promised placements.
        pages_free: reported free pages minus promised ones; may be negative.
        slots: number of batch slots for running, waiting and promised sequences.
        max_slots: number of slots at which the worker counts as full.
        max_running: number of batch slots that the worker has.
        decodes: whether a prefill worker can also decode prompts that it computes.
        overflow_tokens: queued tokens of a decode worker above which prefill workers that decode
            take over requests; None: never.
        last_placement: sequence number of the worker's newest placement; 0 if there is none.
    """

    worker_id: str
    epoch: str
    role: Role
    address: str
    model: str
    compatibility: Compatibility
    health: WorkerHealth
    page_size: int
    pages_total: int
    queue_tokens: int
    pages_free: int
    slots: int
    max_slots: int
    max_running: int
    decodes: bool = False
    overflow_tokens: int | None = None
    last_placement: int = 0

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles in which the worker can serve a request."""
        if self.role is Role.PREFILL and self.decodes:
            return Role.PREFILL, Role.COLOCATED
        return (self.role,)

    def fits_when_idle(self, demand: Demand, role: Role) -> bool:
        """Return whether the request would fit in one of the `roles` if the worker were idle."""
        return demand.min_pages(role, self.page_size) <= self.pages_total

    def has_capacity(self, demand: Demand, role: Role) -> bool:
        """Return whether the request fits now, in one of the `roles`.

        Prompts may wait for pages on a prefill worker. It decodes only if it has batch slots for
        all choices or is idle, so that slots above ``max_running`` remain for prompts.
        """
        if self.health is not WorkerHealth.READY or self.slots >= self.max_slots:
            return False
        if role is Role.PREFILL:
            return True
        if self.role is Role.PREFILL:
            free = self.max_running - self.slots
            if free < min(demand.slots(role), self.max_running):
                return False
        return demand.pages(role, self.page_size) <= self.pages_free
