"""Placement of inputs on encoder workers: a pure function of the workers and a random generator.

A worker gets inputs if its queue is empty, or if it has less than its backlog queued and the inputs
fit its limit. The backlog is a fraction of a second of work. Further inputs wait in the router's
queue, which is fair among tenants. Among these workers, the default policy chooses the one with the
fewest queued tokens.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random

from services.common.encoder_placement import EncoderModel
from services.router.capacity import READY, WorkerHealth
from services.router.choice import PolicyName, choose

_BATCHES = 2
"""Full batches that a worker may have queued in any case: one is computed while the next waits."""


@dataclass(frozen=True, slots=True)
class EncoderSnapshot:
    """State of an encoder worker at one instant.

    Attributes:
        queue_tokens: tokens accepted by the worker or placed on it, and not computed yet.
        max_queue_tokens, batch_tokens: see `EncoderRegistration`.
        tokens_per_s: tokens that it computed per second lately; 0 if that is unknown.
        last_placement: sequence number of the worker's newest placement; 0 if there is none.
        reason: why the worker gets no requests, if it or the router knows that.
    """

    worker_id: str
    model: EncoderModel
    health: WorkerHealth
    queue_tokens: int
    max_queue_tokens: int
    batch_tokens: int
    tokens_per_s: float = 0.0
    last_placement: int = 0
    reason: str | None = None

    def backlog(self, backlog_s: float) -> float:
        """Return the queued tokens from which the worker gets no more, unless its queue is empty.

        Args:
            backlog_s: time in which the worker computes them, seconds.
        """
        least = _BATCHES * self.batch_tokens
        return min(self.max_queue_tokens, max(least, self.tokens_per_s * backlog_s))

    def takes(self, tokens: int, backlog_s: float) -> bool:
        """Return whether a ready worker gets inputs with this number of tokens now."""
        if self.health not in READY:
            return False
        if not self.queue_tokens:
            return True
        fits = self.queue_tokens + tokens <= self.max_queue_tokens
        return fits and self.queue_tokens < self.backlog(backlog_s)


def place_inputs(
    tokens: int,
    workers: Iterable[EncoderSnapshot],
    policy: PolicyName,
    rng: Random,
    *,
    backlog_s: float,
    exclude: Collection[str] = (),
) -> EncoderSnapshot | None:
    """Choose the worker for inputs with this number of tokens; None if each has enough work now.

    Args:
        workers: workers of the model.
        backlog_s: see `EncoderSnapshot.backlog`.
        exclude: ids of workers that must not be used.
    """
    free = [w for w in workers if w.worker_id not in exclude and w.takes(tokens, backlog_s)]
    if not free:
        return None
    return choose(policy, free, lambda of: [float(worker.queue_tokens) for worker in of], rng)
