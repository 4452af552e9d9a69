"""Placement policies: pure functions of a request, the workers and a random generator.

The default policy chooses the worker with the fewest queued tokens (FDC, §6.1 and §6.2). Queued
tokens are those of the last heartbeat plus those of promised placements (`services.router.fleet`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from random import Random
from typing import Protocol, TypeVar

from services.common.placement import Compatibility, Role
from services.router.capacity import USABLE, Demand, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Pair:
    """Workers of one request. For a colocated worker, ``decode`` is it and ``prefill`` is None."""

    prefill: WorkerSnapshot | None
    decode: WorkerSnapshot

    @property
    def queue_tokens(self) -> int:
        """Tokens queued on both workers."""
        return self.decode.queue_tokens + (self.prefill.queue_tokens if self.prefill else 0)

    @property
    def last_placement(self) -> int:
        return self.decode.last_placement


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
        candidates: ids of the decode and colocated workers that may take the request later.
    """

    reason: Reason
    candidates: frozenset[str] = frozenset()


class Candidate(Protocol):
    """A worker or a pair of workers: the properties that policies compare."""

    @property
    def queue_tokens(self) -> int: ...

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
) -> Pair | NoPlacement:
    """Choose a compatible pair with capacity.

    Args:
        reserved: ids of workers that are kept free for earlier requests.
    """
    named = {worker.model for worker in workers}
    if demand.model is None and len(named) > 1:
        return NoPlacement(Reason.AMBIGUOUS_MODEL)
    if demand.model is not None and named and demand.model not in named:
        return NoPlacement(Reason.UNKNOWN_MODEL)
    ready = _compatible_groups(
        w
        for w in workers
        if demand.model in (None, w.model)
        and w.worker_id not in demand.exclude
        and w.worker_id not in reserved
        and w.has_capacity(demand)
        and w.fits_when_idle(demand)
    )
    return _choose(ready, policy, rng) if ready else _explain(demand, workers)


def _explain(demand: Demand, workers: Iterable[WorkerSnapshot]) -> NoPlacement:
    serving = [w for w in workers if demand.model in (None, w.model)]
    sufficient = [w for w in serving if w.fits_when_idle(demand)]
    if _compatible_groups(serving) and not _compatible_groups(sufficient):
        return NoPlacement(Reason.TOO_LARGE)
    groups = _compatible_groups(
        w for w in sufficient if w.health in USABLE and w.worker_id not in demand.exclude
    )
    if not groups:
        return NoPlacement(Reason.NO_WORKERS)
    return NoPlacement(
        Reason.BUSY, frozenset(w.worker_id for _, decodes in groups for w in decodes)
    )


Group = tuple[Sequence[WorkerSnapshot], Sequence[WorkerSnapshot]]


def _compatible_groups(workers: Iterable[WorkerSnapshot]) -> list[Group]:
    """Group workers by compatibility, as (prefill workers, decode workers).

    Each colocated worker is a group of its own: the only decode worker, without prefill workers.
    """
    prefills: defaultdict[Compatibility, list[WorkerSnapshot]] = defaultdict(list)
    decodes: defaultdict[Compatibility, list[WorkerSnapshot]] = defaultdict(list)
    groups: list[Group] = []
    for worker in workers:
        if worker.role is Role.COLOCATED:
            groups.append(((), (worker,)))
        elif worker.role is Role.PREFILL:
            prefills[worker.compatibility].append(worker)
        else:
            decodes[worker.compatibility].append(worker)
    groups.extend((prefills[key], decodes[key]) for key in decodes if key in prefills)
    return groups


def _choose(groups: Sequence[Group], policy: PolicyName, rng: Random) -> Pair:
    """Apply the policy to each role within each group, then to the resulting pairs."""
    choose = _BY_NAME[policy]
    pairs = [
        Pair(choose(prefills, rng) if prefills else None, choose(decodes, rng))
        for prefills, decodes in groups
    ]
    return choose(pairs, rng)


def _least(candidates: Sequence[C], key: Callable[[C], int], rng: Random) -> C:
    least = min(map(key, candidates))
    return rng.choice([c for c in candidates if key(c) == least])


def _shortest_queue(candidates: Sequence[C], rng: Random) -> C:
    return _least(candidates, lambda c: c.queue_tokens, rng)


def _round_robin(candidates: Sequence[C], rng: Random) -> C:
    """Choose the least recently used candidate. This is fair even if workers join or leave."""
    return _least(candidates, lambda c: c.last_placement, rng)


def _random(candidates: Sequence[C], rng: Random) -> C:
    return rng.choice(candidates)


def _power_of_two(candidates: Sequence[C], rng: Random) -> C:
    return _shortest_queue(rng.sample(candidates, min(2, len(candidates))), rng)


class _Choose(Protocol):
    def __call__(self, candidates: Sequence[C], rng: Random, /) -> C: ...


_BY_NAME: dict[PolicyName, _Choose] = {
    PolicyName.SHORTEST_QUEUE: _shortest_queue,
    PolicyName.ROUND_ROBIN: _round_robin,
    PolicyName.RANDOM: _random,
    PolicyName.POWER_OF_TWO: _power_of_two,
}
