"""One epoch of a registered worker: its last heartbeat, and the placements that it lacks."""

from dataclasses import dataclass, field

from services.common.placement import Heartbeat, Registration, Role, WorkerState
from services.router.capacity import Demand, PageCount, Paging, WorkerHealth, WorkerSnapshot
from services.router.speed import noticeable

_AVERAGED = 16  # placements over which the time to their admission is averaged


@dataclass(frozen=True)
class Promise:
    """Load of a placement that the worker has not reported yet. Times are in seconds."""

    made_at: float
    tokens: int
    prompt_tokens: int
    pages: PageCount
    slots: int


@dataclass
class TrackedWorker:
    """One epoch of a worker. Times are in seconds of a monotonic clock."""

    registration: Registration
    last_heartbeat_at: float
    load: Heartbeat | None = None
    promises: dict[str, Promise] = field(default_factory=dict)
    promised_tokens: int = 0
    promised_prompt_tokens: int = 0  # tokens
    promised_pages: int = 0
    promised_stored: int = 0
    promised_slots: int = 0
    slowdown: float = 1.0  # at the last heartbeat, see `services.router.speed.slowdown`
    admission_s: float = 0.0  # recent mean time from a placement to the heartbeat that lists it
    failures: int = 0
    probation_until: float = float("-inf")
    last_placement: int = 0
    snapshot: WorkerSnapshot | None = None  # cached until the worker changes

    @property
    def busy(self) -> bool:
        """Whether the worker has work, reported in its last heartbeat or promised."""
        load = self.load
        return bool(self.promises or (load and (load.queue_tokens or load.running or load.waiting)))

    def promise(
        self, placement_id: str, demand: Demand, role: Role, number: int, now: float
    ) -> None:
        """Add the load of a new placement."""
        pages = demand.pages(role, Paging.of(self.registration))
        prompt = 0 if role is Role.DECODE else demand.prompt_tokens
        promise = Promise(now, demand.tokens(role), prompt, pages, demand.slots(role))
        self.promises[placement_id] = promise
        self.promised_tokens += promise.tokens
        self.promised_prompt_tokens += promise.prompt_tokens
        self.promised_pages += promise.pages.exact
        self.promised_stored += promise.pages.stored
        self.promised_slots += promise.slots
        self.last_placement = number
        self.snapshot = None

    def admit(self, placement_id: str, now: float) -> None:
        """Forget a promise that the load of the worker includes."""
        if promise := self.promises.get(placement_id):
            self.admission_s += (now - promise.made_at - self.admission_s) / _AVERAGED
            self.forget(placement_id)

    def forget(self, placement_id: str) -> None:
        """Remove the load of a placement. Idempotent."""
        if promise := self.promises.pop(placement_id, None):
            self.promised_tokens -= promise.tokens
            self.promised_prompt_tokens -= promise.prompt_tokens
            self.promised_pages -= promise.pages.exact
            self.promised_stored -= promise.pages.stored
            self.promised_slots -= promise.slots
            self.snapshot = None

    def comparable(self, other: "TrackedWorker") -> bool:
        """Return whether the speeds of two workers can be compared: same role and model."""
        mine, its = self.registration, other.registration
        return mine.role is its.role and mine.model.name == its.model.name

    def health(self, now: float, suspect_after_s: float, *, matched: bool) -> WorkerHealth:
        """Return the health of the worker.

        Args:
            matched: whether it has a partner, see `services.router.matching`.
        """
        if self.load is None or self.load.state is WorkerState.STARTING:
            return WorkerHealth.STARTING
        if self.load.state in (WorkerState.NOT_READY, WorkerState.DRAINING):
            return WorkerHealth(self.load.state)
        if now - self.last_heartbeat_at > suspect_after_s:
            return WorkerHealth.SUSPECT
        if now < self.probation_until:
            return WorkerHealth.PROBATION
        return WorkerHealth.READY if matched else WorkerHealth.UNMATCHED

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
            or _REASONS.get(health)
            or unmatched
            or (f"its steps take {slow:.1f} times as long as on the fastest" if slow > 1 else None)
        )


_REASONS = {
    WorkerHealth.SUSPECT: "its heartbeats are late",
    WorkerHealth.PROBATION: "a request failed on it",
}
