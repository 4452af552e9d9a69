"""Slow reference of placement: every event examines every queued call on every worker.

The fast implementation (`services.router.policy`, `roster`, `queue`, `dispatcher`) must give the
same answers in the same order.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, Protocol, TypeVar
from zlib import crc32

from services.common.placement import Compatibility, Role
from services.router.capacity import READY, USABLE, Demand, WorkerSnapshot
from services.router.choice import PolicyName
from services.router.policy import NOTHING_CACHED, Pair
from services.router.roster import Reason


@dataclass(frozen=True)
class NoPlacement:
    """Result if no pair was found: the reason, and the workers that may decode it later."""

    reason: Reason
    candidates: frozenset[str] = frozenset()


C = TypeVar("C", WorkerSnapshot, Pair)


class KeyedRandom(Random):
    """Random choices that depend on the members of a sequence, not on their order or number."""

    def __init__(self, salt: int) -> None:
        super().__init__(salt)
        self._salt = salt

    def _key(self, candidate: Any) -> int:
        names = [w.worker_id for w, _ in candidate.roles] if isinstance(candidate, Pair) else []
        return crc32(repr((self._salt, names or candidate.worker_id)).encode())

    def choice(self, seq: Any) -> Any:
        return min(seq, key=self._key)

    def sample(self, population: Any, k: int, **_: Any) -> Any:
        return sorted(population, key=self._key)[:k]


def _has_capacity(worker: WorkerSnapshot, demand: Demand, role: Role) -> bool:
    """Return whether a request fits on a worker now, in one of its roles."""
    return not (role is not Role.DECODE and worker.has_prompt_backlog) and _has_space(
        worker, demand, role
    )


def _has_space(worker: WorkerSnapshot, demand: Demand, role: Role) -> bool:
    if worker.health not in READY or worker.slots >= worker.max_slots:
        return False
    output = worker.need(demand, role)[0]
    if not output or role is Role.PREFILL:
        return output > 0
    if worker.role is Role.PREFILL and worker.max_running - worker.slots < demand.slots(role):
        return False
    return demand.pages(role, worker.page_plan, output).fits(worker.pages_free)


def place(
    demand: Demand,
    workers: Sequence[WorkerSnapshot],
    policy: PolicyName,
    rng: Random,
    *,
    reserved: frozenset[str] = frozenset(),
    queued: int = 0,
    cached: Mapping[str, int] = NOTHING_CACHED,
) -> Pair | NoPlacement:
    """Choose a compatible pair with capacity.

    Args:
        reserved: ids of workers that must not decode the request, because earlier requests wait
            for their capacity. They may still compute its prompt.
        queued: prompt tokens of the other requests in the router's queue.
        cached: prompt tokens that workers are expected to have cached, by worker id.
    """
    if policy is not PolicyName.SHORTEST_QUEUE:
        cached = NOTHING_CACHED
    named = {worker.model.name for worker in workers}
    if demand.model is None and len(named) > 1:
        return NoPlacement(Reason.AMBIGUOUS_MODEL)
    if demand.model is not None and named and demand.model not in named:
        return NoPlacement(Reason.UNKNOWN_MODEL)
    offers = [
        (w, role)
        for w, role in _offers(demand, workers)
        if w.worker_id not in demand.exclude
        and (role is Role.PREFILL or w.worker_id not in reserved)
        and _has_space(w, demand, role)
    ]
    ready = [
        (w, role)
        for w, role in offers
        if _has_capacity(w, demand, role)
        and not _is_worth_waiting(demand, w, role, offers, queued, cached)
    ]
    groups = _compatible_groups([*ready, *_backlogged(offers, ready, cached)])
    if not groups:
        return _explain(demand, workers)
    return _choose(demand, _larger(demand, groups), policy, rng, cached)


def _backlogged(
    offers: "list[Offer]", ready: "list[Offer]", cached: Mapping[str, int]
) -> "list[Offer]":
    """Return the workers with cached tokens that have too many prompts, unlike an equal worker."""
    equal = [(role, _shape(w)) for w, role in ready]
    return [
        (w, role)
        for w, role in offers
        if w.worker_id in cached
        and role is not Role.DECODE
        and w.has_prompt_backlog
        and (role, _shape(w)) in equal
    ]


def _shape(w: WorkerSnapshot) -> tuple[object, ...]:
    return w.model.name, w.compatibility, w.role, w.decodes, w.pages_total, w.max_running


def _is_worth_waiting(
    demand: Demand,
    slow: WorkerSnapshot,
    role: Role,
    offers: "list[Offer]",
    queued: int,
    cached: Mapping[str, int],
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
    delay = _delay_as(role, demand, cached)
    wait = min(map(delay, fast), default=inf) + queued / max(1, len(fast))
    return wait < delay(slow)


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
        if demand.model in (None, worker.model.name):
            for role in worker.roles:
                yield worker, role


def _sufficient(demand: Demand, offers: Iterable[Offer]) -> Iterator[Offer]:
    """Yield the offers of workers on which the request fits when they are idle."""
    return ((w, role) for w, role in offers if w.need(demand, role)[0])


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
        return max(w.need(demand, role)[0] for w in decoders)

    def with_output(self, demand: Demand, least: float) -> "_Group":
        """Return the group without decoders on which fewer output tokens fit."""
        decode = [w for w in self.decode if w.need(demand, Role.DECODE)[0] >= least]
        colocated = [w for w in self.colocated if w.need(demand, Role.COLOCATED)[0] >= least]
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


def _choose(
    demand: Demand,
    groups: Sequence[_Group],
    policy: PolicyName,
    rng: Random,
    cached: Mapping[str, int],
) -> Pair:
    """Apply the policy to each role within each group, then to the resulting pairs."""
    choose = _BY_NAME[policy]
    prefill, decode, alone = (_delay_as(role, demand, cached) for role in _ROLES)
    pairs: list[Pair] = []
    fallbacks: list[Pair] = []
    for group in groups:
        if group.prefill and group.decode:
            chosen = choose(group.prefill, prefill, rng), choose(group.decode, decode, rng)
            pair = Pair(*chosen, cached)
            if policy is PolicyName.SHORTEST_QUEUE:
                pair = _overflow(demand, pair, group.colocated, rng)
            pairs.append(pair)
        else:
            pair = Pair(None, choose(group.colocated, alone, rng), cached)
            (fallbacks if group.is_fallback else pairs).append(pair)
    return choose(pairs or fallbacks, lambda pair: pair.delay(demand), rng)


_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


def _delay_as(
    role: Role, demand: Demand, cached: Mapping[str, int]
) -> Callable[[WorkerSnapshot], float]:
    return lambda worker: worker.delay(demand, role, cached.get(worker.worker_id, 0))


def _overflow(demand: Demand, pair: Pair, prefill: Sequence[WorkerSnapshot], rng: Random) -> Pair:
    """Replace the pair by one prefill worker if its delay is shorter than the decode excess.

    Args:
        prefill: prefill workers that can serve the request alone.
    """
    bound = pair.decode.overflow_tokens
    if bound is None or not prefill:
        return pair
    delay = _delay_as(Role.COLOCATED, demand, pair.cached)
    shortest = _shortest_queue(prefill, delay, rng)
    excess = _delay_as(Role.DECODE, demand, pair.cached)(pair.decode) - bound
    return Pair(None, shortest, pair.cached) if delay(shortest) < excess else pair


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
