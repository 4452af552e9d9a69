"""Placement policies: pure functions of a request, the workers and a random generator.

The default policy chooses the worker with the fewest queued tokens (FDC, §6.1 and §6.2). Queued
tokens are those of the last heartbeat plus those of promised placements (`services.router.fleet`).
Those of a slow worker count more, in proportion to the time that it needs for them
(`WorkerSnapshot.delay`). A prompt waits for a fast worker that computes it earlier. With workers of
equal speed, only the numbers of tokens are compared.

A prefill worker with ``decodes`` can serve a request alone, as a colocated worker does:

- Overflow, default policy only. The excess of a decode worker is its delay minus its
  ``overflow_tokens``. After a pair is chosen, the compatible prefill worker with the shortest delay
  replaces it if that is shorter than the excess of the pair's decode worker.
- Fallback, every policy. Prefill workers serve requests alone if no other worker can decode them
  now: the decode and colocated workers are full, not ready, or not registered.

If a request requires fewer output tokens than its maximum, small workers would end long outputs
early. Of the workers that can take it now, those are not used on which less than half as many
output tokens fit as on the largest of them. A request never waits for a larger worker.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from math import inf
from random import Random
from typing import Protocol, TypeVar

from services.common.placement import Compatibility, Role
from services.router.capacity import USABLE, Demand, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Pair:
    """Workers of one request. If one worker serves it alone, ``prefill`` is None."""

    prefill: WorkerSnapshot | None
    decode: WorkerSnapshot

    @property
    def roles(self) -> list[tuple[WorkerSnapshot, Role]]:
        """Each worker with the role in which it serves the request."""
        if self.prefill is None:
            return [(self.decode, Role.COLOCATED)]
        return [(self.prefill, Role.PREFILL), (self.decode, Role.DECODE)]

    @property
    def last_placement(self) -> int:
        return self.decode.last_placement

    def delay(self, demand: Demand) -> float:
        """Return the sum of the delays on both workers, see `WorkerSnapshot.delay`."""
        return sum(worker.delay(demand, role) for worker, role in self.roles)


class Reason(Enum):
    """Reason why a request is not placed. Waiting helps only if it is `BUSY`."""

    UNKNOWN_MODEL = auto()
    AMBIGUOUS_MODEL = auto()  # several models are served and the request names none
    TOO_LARGE = auto()
    NO_WORKERS = auto()
    BUSY = auto()


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """Result if no pair was found.

    Attributes:
        candidates: ids of the workers that may decode the request later.
    """

    reason: Reason
    candidates: frozenset[str] = frozenset()


class Candidate(Protocol):
    """A worker or a pair of workers: the property that policies compare besides the delay."""

    @property
    def last_placement(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class PolicyName(StrEnum):
    """Name of a policy in the settings."""

    SHORTEST_QUEUE = "shortest_queue"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"


def place(
    demand: Demand,
    workers: Sequence[WorkerSnapshot],
    policy: PolicyName,
    rng: Random,
    *,
    reserved: frozenset[str] = frozenset(),
    queued: int = 0,
) -> Pair | NoPlacement:
    """Choose a compatible pair with capacity.

    Args:
        reserved: ids of workers that must not decode the request, because earlier requests wait
            for their capacity. They may still compute its prompt.
        queued: prompt tokens of the other requests in the router's queue.
    """
    named = {worker.model for worker in workers}
    if demand.model is None and len(named) > 1:
        return NoPlacement(Reason.AMBIGUOUS_MODEL)
    if demand.model is not None and named and demand.model not in named:
        return NoPlacement(Reason.UNKNOWN_MODEL)
    offers = [
        (w, role)
        for w, role in _offers(demand, workers)
        if w.worker_id not in demand.exclude
        and (role is Role.PREFILL or w.worker_id not in reserved)
        and w.has_space(demand, role)
    ]
    ready = _compatible_groups(
        (w, role)
        for w, role in offers
        if w.has_capacity(demand, role) and not _is_worth_waiting(demand, w, role, offers, queued)
    )
    if not ready:
        return _explain(demand, workers)
    return _choose(demand, _larger(demand, ready), policy, rng)


def _is_worth_waiting(
    demand: Demand, slow: WorkerSnapshot, role: Role, offers: "list[Offer]", queued: int
) -> bool:
    """Return whether a prompt would be computed earlier after a wait than now on a slow worker.

    It would wait for workers at full speed that have too many prompts for now. All queued prompts
    count, also later ones: if the queue is long, slow workers must help.
    """
    if slow.slowdown == 1.0 or role is Role.DECODE or not demand.may_wait:
        return False
    fast = [
        w
        for w, other in offers
        if other is role and w.slowdown == 1.0 and w.compatibility == slow.compatibility
    ]
    wait = min((w.delay(demand, role) for w in fast), default=inf) + queued / max(1, len(fast))
    return wait < slow.delay(demand, role)


def can_serve(workers: Iterable[WorkerSnapshot]) -> bool:
    """Return whether one of the workers, or a compatible pair of them, can serve requests."""
    return bool(_compatible_groups((w, role) for w in workers for role in w.roles))


def context_length(workers: Iterable[WorkerSnapshot]) -> int | None:
    """Return the largest context of these workers; None if they cannot serve requests."""
    groups = _compatible_groups((w, role) for w in workers for role in w.roles)
    return max((w.context_length for group in groups for w in group.decoders), default=None)


def _explain(demand: Demand, workers: Iterable[WorkerSnapshot]) -> NoPlacement:
    serving = list(_offers(demand, workers))
    if _compatible_groups(serving) and not _compatible_groups(_sufficient(demand, serving)):
        return NoPlacement(Reason.TOO_LARGE)
    groups = _compatible_groups(_sufficient(demand, _usable(demand, workers)))
    if not groups:
        return NoPlacement(Reason.NO_WORKERS)
    candidates = (w.worker_id for group in groups for w in group.decoders)
    return NoPlacement(Reason.BUSY, frozenset(candidates))


Offer = tuple[WorkerSnapshot, Role]
"""A worker, and a role in which it can serve a request."""


def _offers(demand: Demand, workers: Iterable[WorkerSnapshot]) -> Iterator[Offer]:
    """Yield every role of every worker that serves the model."""
    for worker in workers:
        if demand.model in (None, worker.model):
            for role in worker.roles:
                yield worker, role


def _sufficient(demand: Demand, offers: Iterable[Offer]) -> Iterator[Offer]:
    """Yield the offers of workers on which the request fits when they are idle."""
    return ((w, role) for w, role in offers if w.max_output(demand, role))


def _usable(demand: Demand, workers: Iterable[WorkerSnapshot]) -> Iterator[Offer]:
    """Yield the offers of workers that take requests now or soon."""
    usable = (w for w in workers if w.health in USABLE and w.worker_id not in demand.exclude)
    return _offers(demand, usable)


@dataclass(frozen=True, slots=True)
class _Group:
    """Compatible workers, by the role in which they can serve the request."""

    prefill: list[WorkerSnapshot] = field(default_factory=list)
    decode: list[WorkerSnapshot] = field(default_factory=list)
    colocated: list[WorkerSnapshot] = field(default_factory=list)

    def add(self, worker: WorkerSnapshot, role: Role) -> None:
        match role:
            case Role.PREFILL:
                self.prefill.append(worker)
            case Role.DECODE:
                self.decode.append(worker)
            case Role.COLOCATED:
                self.colocated.append(worker)

    @property
    def decoders(self) -> list[WorkerSnapshot]:
        """Workers that can decode the request, alone or after a prefill worker of the group."""
        return [*self.decode, *self.colocated] if self.prefill else self.colocated

    @property
    def is_fallback(self) -> bool:
        """Whether prefill workers must decode because no decode worker can."""
        return bool(self.prefill) and not self.decode

    def largest_output(self, demand: Demand) -> int:
        """Return the output tokens that fit on the largest decoder.

        Prefill workers count only in a fallback.
        """
        paired = bool(self.prefill and self.decode)
        decoders, role = (self.decode, Role.DECODE) if paired else (self.colocated, Role.COLOCATED)
        return max(w.max_output(demand, role) for w in decoders)

    def with_output(self, demand: Demand, least: float) -> "_Group":
        """Return the group without decoders on which fewer output tokens fit."""
        decode = [w for w in self.decode if w.max_output(demand, Role.DECODE) >= least]
        colocated = [w for w in self.colocated if w.max_output(demand, Role.COLOCATED) >= least]
        return _Group(self.prefill, decode, colocated)


def _compatible_groups(offers: Iterable[Offer]) -> list[_Group]:
    """Group workers by compatibility. Each colocated worker is a group of its own.

    Returns:
        The groups that can serve the request.
    """
    shared: defaultdict[Compatibility, _Group] = defaultdict(_Group)
    groups: list[_Group] = []
    for worker, role in offers:
        if worker.role is Role.COLOCATED:
            groups.append(_Group(colocated=[worker]))
        else:
            shared[worker.compatibility].add(worker, role)
    return [group for group in (*groups, *shared.values()) if group.decoders]


def _larger(demand: Demand, groups: list[_Group]) -> list[_Group]:
    """Return the groups without workers that are too small for a request of unknown output."""
    if demand.least_tokens >= demand.max_tokens:
        return groups
    regular = [group for group in groups if not group.is_fallback] or groups
    half = max(group.largest_output(demand) for group in regular) / 2
    larger = (group.with_output(demand, half) for group in groups)
    return [group for group in larger if group.decoders]


def _choose(demand: Demand, groups: Sequence[_Group], policy: PolicyName, rng: Random) -> Pair:
    """Apply the policy to each role within each group, then to the resulting pairs."""
    choose = _BY_NAME[policy]
    prefill, decode, alone = (_delay_as(role, demand) for role in _ROLES)
    pairs: list[Pair] = []
    fallbacks: list[Pair] = []
    for group in groups:
        if group.prefill and group.decode:
            pair = Pair(choose(group.prefill, prefill, rng), choose(group.decode, decode, rng))
            if policy is PolicyName.SHORTEST_QUEUE:
                pair = _overflow(demand, pair, group.colocated, rng)
            pairs.append(pair)
        else:
            pair = Pair(None, choose(group.colocated, alone, rng))
            (fallbacks if group.is_fallback else pairs).append(pair)
    return choose(pairs or fallbacks, lambda pair: pair.delay(demand), rng)


_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


def _delay_as(role: Role, demand: Demand) -> Callable[[WorkerSnapshot], float]:
    return lambda worker: worker.delay(demand, role)


def _overflow(demand: Demand, pair: Pair, prefill: Sequence[WorkerSnapshot], rng: Random) -> Pair:
    """Replace the pair by one prefill worker if its delay is shorter than the decode excess.

    Args:
        prefill: prefill workers that can serve the request alone.
    """
    bound = pair.decode.overflow_tokens
    if bound is None or not prefill:
        return pair
    delay = _delay_as(Role.COLOCATED, demand)
    shortest = _shortest_queue(prefill, delay, rng)
    excess = pair.decode.delay(demand, Role.DECODE) - bound
    return Pair(None, shortest) if delay(shortest) < excess else pair


def _least(candidates: Sequence[C], key: Callable[[C], float], rng: Random) -> C:
    keys = [key(candidate) for candidate in candidates]
    least = min(keys)
    return rng.choice([c for c, value in zip(candidates, keys, strict=True) if value == least])


def _shortest_queue(candidates: Sequence[C], delay: Callable[[C], float], rng: Random) -> C:
    return _least(candidates, delay, rng)


def _round_robin(candidates: Sequence[C], _delay: Callable[[C], float], rng: Random) -> C:
    """Choose the least recently used candidate. This is fair even if workers join or leave."""
    return _least(candidates, lambda c: c.last_placement, rng)


def _random(candidates: Sequence[C], _delay: Callable[[C], float], rng: Random) -> C:
    return rng.choice(candidates)


def _power_of_two(candidates: Sequence[C], delay: Callable[[C], float], rng: Random) -> C:
    return _shortest_queue(rng.sample(candidates, min(2, len(candidates))), delay, rng)


class _Choose(Protocol):
    def __call__(
        self, candidates: Sequence[C], delay: Callable[[C], float], rng: Random, /
    ) -> C: ...


_BY_NAME: dict[PolicyName, _Choose] = {
    PolicyName.SHORTEST_QUEUE: _shortest_queue,
    PolicyName.ROUND_ROBIN: _round_robin,
    PolicyName.RANDOM: _random,
    PolicyName.POWER_OF_TWO: _power_of_two,
}
