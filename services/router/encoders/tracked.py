"""One epoch of an encoder worker: its last heartbeat, and the placements in progress on it."""

from dataclasses import dataclass, field

from services.common.encoder_placement import EncoderHeartbeat, EncoderRegistration, EncoderView
from services.router.capacity import REASONS, WorkerHealth, health_of
from services.router.encoders.policy import EncoderSnapshot


@dataclass
class TrackedEncoder:
    """One epoch of an encoder worker. Times are in seconds of a monotonic clock.

    A call lasts for some milliseconds, and heartbeats are further apart. The load is therefore
    counted from the placements of this router until they are released, or until a heartbeat says
    that they have ended. A heartbeat adds the tokens that other routers have placed: those in its
    queue, less those of this router's placements that it includes.

    Attributes:
        load: last heartbeat; None before the first.
        placed: tokens of each placement in progress, by id.
        admitted: ids of the placements in progress that a heartbeat has listed.
        others: tokens that other routers had placed, at the last heartbeat.
        failures: number of failures since the last success.
        last_placement: number of the newest placement on the worker.
    """

    registration: EncoderRegistration
    last_heartbeat_at: float
    load: EncoderHeartbeat | None = None
    placed: dict[str, int] = field(default_factory=dict)
    placed_tokens: int = 0
    admitted: set[str] = field(default_factory=set)
    others: int = 0
    failures: int = 0
    probation_until: float = float("-inf")
    last_placement: int = 0

    def report(self, load: EncoderHeartbeat, now: float) -> None:
        """Set the load of the worker to a new heartbeat."""
        self.load = load
        self.last_heartbeat_at = now
        self.admitted.update(id for id in load.admitted if id in self.placed)
        for placement_id in load.ended:
            self.forget(placement_id)
        included = sum(self.placed[id] for id in self.admitted)
        self.others = max(0, load.queue_tokens - included)

    def place(self, placement_id: str, tokens: int, number: int) -> None:
        """Add the tokens of a new placement with this number."""
        self.placed[placement_id] = tokens
        self.placed_tokens += tokens
        self.last_placement = number

    def forget(self, placement_id: str) -> None:
        """Remove the tokens of a placement that has ended, if there are any."""
        self.placed_tokens -= self.placed.pop(placement_id, 0)
        self.admitted.discard(placement_id)

    @property
    def queue_tokens(self) -> int:
        """Tokens accepted by the worker or placed on it, and not computed yet."""
        return self.placed_tokens + self.others

    def health(self, now: float, suspect_after_s: float) -> WorkerHealth:
        """Return the health of the worker."""
        return health_of(
            self.load.state if self.load else None,
            is_late=now - self.last_heartbeat_at > suspect_after_s,
            has_failed=now < self.probation_until,
        )

    def reason(self, health: WorkerHealth) -> str | None:
        """Return why the worker gets no requests, or None."""
        if self.load is None:
            return "no heartbeat since registration"
        return self.load.reason or REASONS.get(health)

    def snapshot(self, health: WorkerHealth) -> EncoderSnapshot:
        """Return the state of the worker, for the policy."""
        registration = self.registration
        return EncoderSnapshot(
            worker_id=registration.worker_id,
            model=registration.model,
            health=health,
            queue_tokens=self.queue_tokens,
            max_queue_tokens=registration.max_queue_tokens,
            batch_tokens=registration.batch_tokens,
            tokens_per_s=self.load.tokens_per_s if self.load else 0.0,
            last_placement=self.last_placement,
            reason=self.reason(health),
        )

    def view(self, health: WorkerHealth, now: float) -> EncoderView:
        """Return the state of the worker, for operators."""
        registration, load = self.registration, self.load
        return EncoderView(
            worker_id=registration.worker_id,
            epoch=registration.epoch,
            address=registration.address,
            model=registration.model,
            state=health,
            reason=self.reason(health),
            queue_tokens=self.queue_tokens,
            tokens_per_s=load.tokens_per_s if load else 0.0,
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            silent_s=now - self.last_heartbeat_at,
        )
