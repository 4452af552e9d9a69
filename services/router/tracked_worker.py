"""One epoch of a worker: its last heartbeat, and the placements that no heartbeat has listed."""

from dataclasses import dataclass, field
from math import ceil

from runtime.pages.plan import PageCount, PagePlan
from services.common.listings import WorkerView
from services.common.placement import Heartbeat, Registration, Role
from services.router.capacity import REASONS, Demand, WorkerHealth, WorkerSnapshot, health_of
from services.router.prefix_memory import PrefixMemory
from services.router.speed import noticeable

_AVERAGED = 16
"""Number of placements over which the time to their admission is averaged."""


@dataclass(frozen=True)
class Promise:
    """Load of a placement that the worker has not reported yet. Times are in seconds.

    Attributes:
        prefix: hashes of the beginning of the prompt, see `services.common.prefix_hashes`.
    """

    made_at: float
    tokens: int
    prompt_tokens: int
    pages: PageCount
    slots: int
    prefix: tuple[bytes, ...]


@dataclass
class TrackedWorker:
    """One epoch of a worker. Times are in seconds of a monotonic clock.

    Attributes:
        prefixes: beginnings of the prompts that were placed on the worker.
        load: last heartbeat; None before the first.
        promises: placements that no heartbeat has listed yet, by id.
        pages_free: free pages at the last heartbeat; 0 before the first.
        slowdown: result of `services.router.speed.slowdown` at the last heartbeat.
        admission_s: recent mean time from a placement to the heartbeat that lists it, seconds.
        failures: number of failures since the last success.
        last_placement: number of the newest placement on the worker.
        snapshot: snapshot that is valid until the worker changes, or None.
        suspect_at: time at which the fleet will check whether the worker is suspect.
    """

    registration: Registration
    last_heartbeat_at: float
    prefixes: PrefixMemory
    load: Heartbeat | None = None
    promises: dict[str, Promise] = field(default_factory=dict)
    promised_tokens: int = 0
    promised_prompt_tokens: int = 0
    pages_free: PageCount = field(init=False)
    promised_pages: PageCount = field(init=False)
    promised_slots: int = 0
    slowdown: float = 1.0
    admission_s: float = 0.0
    failures: int = 0
    probation_until: float = float("-inf")
    last_placement: int = 0
    snapshot: WorkerSnapshot | None = None
    suspect_at: float | None = None

    def __post_init__(self) -> None:
        self.pages_free = self.promised_pages = self.registration.page_count.times(0)

    @property
    def page_plan(self) -> PagePlan:
        """Page plan, which computes the numbers of pages that requests need on the worker."""
        return self.registration.compatibility.page_plan

    @property
    def busy(self) -> bool:
        """Whether the worker has work, reported in its last heartbeat or promised."""
        load = self.load
        return bool(self.promises or (load and (load.queue_tokens or load.running or load.waiting)))

    def report(self, load: Heartbeat, now: float) -> None:
        """Set the load of the worker to a new heartbeat.

        Raises:
            ValueError: the heartbeat does not have the page groups of the registration.
        """
        self.pages_free = self.page_plan.count(load.pages_free)
        self.load = load
        self.last_heartbeat_at = now
        self.snapshot = None

    def promise(
        self,
        placement_id: str,
        demand: Demand,
        role: Role,
        max_tokens: int,
        number: int,
        now: float,
        cached: int = 0,
    ) -> None:
        """Add the load of a new placement with this number.

        Args:
            max_tokens: maximum output tokens of each choice.
            cached: prompt tokens that the worker is expected to have cached.
        """
        share = self.registration.compatibility.kv_eviction
        pages = demand.pages(role, self.page_plan, max_tokens, kv_eviction=share)
        prompt = 0 if role is Role.DECODE else demand.prompt_tokens - cached
        tokens, slots = demand.tokens(role, max_tokens, cached=cached), demand.slots(role)
        promise = Promise(now, tokens, prompt, pages, slots, demand.prefix)
        self.promises[placement_id] = promise
        self.promised_tokens += promise.tokens
        self.promised_prompt_tokens += promise.prompt_tokens
        self.promised_pages = self.promised_pages.plus(pages)
        self.promised_slots += promise.slots
        self.last_placement = number
        self.prefixes.remember(demand.prefix, placement_id)
        self.snapshot = None

    def admit(self, placement_id: str, now: float) -> None:
        """Forget a promise, because the reported load of the worker now includes it."""
        if promise := self.promises.get(placement_id):
            self.admission_s += (now - promise.made_at - self.admission_s) / _AVERAGED
            self.forget(placement_id)

    def forget(self, placement_id: str) -> bool:
        """Remove the load of a placement; return whether there was any."""
        if (promise := self.promises.pop(placement_id, None)) is None:
            return False
        self.promised_tokens -= promise.tokens
        self.promised_prompt_tokens -= promise.prompt_tokens
        self.promised_pages = self.promised_pages.minus(promise.pages)
        self.promised_slots -= promise.slots
        self.snapshot = None
        return True

    def withdraw(self, placement_id: str) -> bool:
        """Remove the load and the prompt of a placement that the worker will not get.

        Return whether the placement was known.
        """
        if promise := self.promises.get(placement_id):
            self.prefixes.forget(promise.prefix, placement_id)
        return self.forget(placement_id)

    @property
    def kind(self) -> tuple[Role, str]:
        """Role and model. The speeds of workers are comparable if these are equal."""
        return self.registration.role, self.registration.model.name

    def health(self, now: float, suspect_after_s: float, *, matched: bool) -> WorkerHealth:
        """Return the health of the worker.

        Args:
            matched: whether it has a partner, see `services.router.matching`.
        """
        health = health_of(
            self.load.state if self.load else None,
            is_late=now - self.last_heartbeat_at > suspect_after_s,
            has_failed=now < self.probation_until,
        )
        return health if matched or health is not WorkerHealth.READY else WorkerHealth.UNMATCHED

    def reason(self, health: WorkerHealth, unmatched: str | None) -> str | None:
        """Return why the worker gets no requests, or fewer than others; None if neither is true.

        Args:
            unmatched: why it has no partner, or None.
        """
        if self.load is None:
            return "no heartbeat since registration"
        slow = noticeable(self.slowdown)
        return (
            self.load.reason
            or REASONS.get(health)
            or unmatched
            or (f"its steps take {slow:.1f} times as long as on the fastest" if slow > 1 else None)
        )

    def take_snapshot(
        self, health: WorkerHealth, unmatched: str | None, backlog: float, prompt_backlog_s: float
    ) -> WorkerSnapshot:
        """Return the state of the worker, for the policy, and keep it in ``snapshot``.

        Args:
            unmatched: why it has no partner, or None.
            backlog, prompt_backlog_s: see `RouterSettings`.
        """
        registration, load = self.registration, self.load
        self.snapshot = WorkerSnapshot(
            worker_id=registration.worker_id,
            role=registration.role,
            model=registration.model,
            compatibility=registration.compatibility,
            health=health,
            pages_total=registration.page_count,
            queue_tokens=(load.queue_tokens if load else 0) + self.promised_tokens,
            pending_prompt_tokens=(load.pending_prompt_tokens if load else 0)
            + self.promised_prompt_tokens,
            max_pending_prompt_tokens=self._max_pending_prompt_tokens(prompt_backlog_s),
            slowdown=noticeable(self.slowdown),
            pages_free=self.pages_free.minus(self.promised_pages),
            slots=(load.running + load.waiting if load else 0) + self.promised_slots,
            max_slots=self._max_slots(backlog),
            max_running=registration.max_running,
            decodes=registration.decodes,
            overflow_tokens=registration.overflow_tokens,
            last_placement=self.last_placement,
            reason=self.reason(health, unmatched),
        )
        return self.snapshot

    def _max_slots(self, backlog: float) -> int:
        """Return the number of slots at which the worker gets no further requests."""
        running = self.registration.max_running
        return min(ceil(running * backlog), running + self.registration.max_waiting)

    def _max_pending_prompt_tokens(self, prompt_backlog_s: float) -> float | None:
        """Return the pending prompt tokens at which the worker gets no further prompt.

        These are the tokens that it computes in the sum of ``prompt_backlog_s`` and the mean delay
        until it reports a placement, so that it does not idle. None if its prompt tokens per second
        are unknown.
        """
        rate = self.load.prompt_tokens_per_s if self.load else 0.0
        return rate * (prompt_backlog_s + self.admission_s) if rate else None

    def view(self, health: WorkerHealth, unmatched: str | None, now: float) -> WorkerView:
        """Return the state of the worker, for operators.

        Args:
            unmatched: why it has no partner, or None.
        """
        registration, load = self.registration, self.load
        return WorkerView(
            worker_id=registration.worker_id,
            epoch=registration.epoch,
            role=registration.role,
            address=registration.address,
            model=registration.model.name,
            state=health,
            reason=self.reason(health, unmatched),
            queue_tokens=load.queue_tokens if load else 0,
            promised_tokens=self.promised_tokens,
            pending_prompt_tokens=load.pending_prompt_tokens if load else 0,
            prompt_tokens_per_s=load.prompt_tokens_per_s if load else 0.0,
            inter_token_s=load.inter_token_s if load else 0.0,
            slowdown=self.slowdown,
            pages_free=self.page_plan.by_name(self.pages_free),
            promised_pages=self.page_plan.by_name(self.promised_pages),
            pages_total=registration.pages_total,
            page_bytes=registration.page_bytes,
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            kv_raw_bytes=load.kv_raw_bytes if load else 0,
            kv_wire_bytes=load.kv_wire_bytes if load else 0,
            kv_faster_raw_bytes=load.kv_faster_raw_bytes if load else 0,
            silent_s=now - self.last_heartbeat_at,
            decodes=registration.decodes,
            model_info=registration.model,
            compatibility=registration.compatibility,
        )
