"""Where a request goes: a pure function of the request, the workers and a random generator.

The default is the shortest queue, in tokens (FDC, §6.1 and §6.2). A queue here is what a worker
last reported plus what was promised to it since; `services.router.fleet` does that arithmetic.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from random import Random
from typing import Protocol, TypeVar

from services.common.placement import Compatibility, Role


class Standing(StrEnum):
    """How the router thinks of a worker. Those in `TRUSTED` take requests now or soon."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"  # not heard for a while
    PROBATION = "probation"  # failed a request; waits before it is given another


TRUSTED = frozenset({Standing.READY, Standing.SUSPECT, Standing.PROBATION})


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of its workers.

    How many tokens a request will generate is unknown. Placing counts ``output_reserve`` of them
    at most, for each choice, so that a client that names no limit does not claim a worker for
    itself; a worker's own admission has the last word.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    model: str | None = None
    exclude: frozenset[str] = frozenset()
    output_reserve: int = 256

    @property
    def choice_tokens(self) -> int:
        """What one choice is counted as on a decode worker: the last token is never stored."""
        return self.prompt_tokens + min(self.max_tokens - 1, self.output_reserve)

    def tokens(self, role: Role) -> int:
        """What this adds to the queue of a worker of that role."""
        return self.prompt_tokens if role is Role.PREFILL else self.choices * self.choice_tokens

    def seats(self, role: Role) -> int:
        """Places in a worker's batch."""
        return 1 if role is Role.PREFILL else self.choices

    def pages(self, role: Role, page_size: int) -> int:
        """Pages that must be free for it to start; choices share the full pages of the prompt."""
        if role is Role.PREFILL:
            return -(-self.prompt_tokens // page_size)
        shared = self.prompt_tokens // page_size
        return shared + self.choices * (-(-self.choice_tokens // page_size) - shared)

    def pages_at_least(self, role: Role, page_size: int) -> int:
        """Pages without which it can never end as asked: `pages`, or one choice at full length."""
        if role is Role.PREFILL:
            return self.pages(role, page_size)
        whole = -(-(self.prompt_tokens + self.max_tokens - 1) // page_size)
        return max(whole, self.pages(role, page_size))


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker at one instant, promises included.

    Attributes:
        queue_tokens: reported and promised.
        pages_free: reported, less the promised; may be negative.
        seats: of its batch, running, waiting and promised.
        max_seats: that may be taken before it counts as full.
        last_turn: number of the newest placement it took part in; 0 before the first.
    """

    worker_id: str
    epoch: str
    role: Role
    address: str
    model: str
    compatibility: Compatibility
    standing: Standing
    page_size: int
    pages_total: int
    queue_tokens: int
    pages_free: int
    seats: int
    max_seats: int
    last_turn: int = 0

    def can_hold(self, demand: Demand) -> bool:
        """Whether it could take the request if it were idle."""
        return demand.pages_at_least(self.role, self.page_size) <= self.pages_total

    def has_room(self, demand: Demand) -> bool:
        """Whether it can take the request now; prompts may queue for a prefill worker's pages."""
        if self.standing is not Standing.READY or self.seats >= self.max_seats:
            return False
        return (
            self.role is Role.PREFILL or demand.pages(self.role, self.page_size) <= self.pages_free
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers of one request; a colocated one is ``decode`` alone."""

    prefill: WorkerSnapshot | None
    decode: WorkerSnapshot

    @property
    def queue_tokens(self) -> int:
        """What waits before the request on its whole way."""
        return self.decode.queue_tokens + (self.prefill.queue_tokens if self.prefill else 0)

    @property
    def last_turn(self) -> int:
        return self.decode.last_turn


class Reason(Enum):
    """Why a request is not placed now; only `BUSY` is worth waiting for."""

    UNKNOWN_MODEL = auto()
    AMBIGUOUS_MODEL = auto()  # several are served, and the request names none
    TOO_LARGE = auto()
    NO_WORKERS = auto()
    BUSY = auto()


@dataclass(frozen=True, slots=True)
class NotNow:
    """No pair; ``waits_for`` are the decode or colocated workers that could take it when free."""

    reason: Reason
    waits_for: frozenset[str] = frozenset()


class Candidate(Protocol):
    """What a policy chooses by: a worker, or a pair of them."""

    @property
    def queue_tokens(self) -> int: ...

    @property
    def last_turn(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class PolicyName(StrEnum):
    """The policies by the name that a setting gives them."""

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
    held: frozenset[str] = frozenset(),
) -> Pair | NotNow:
    """Chooses a compatible pair that has room.

    Args:
        held: workers kept free for requests that came earlier; they count as full.
    """
    named = {worker.model for worker in workers}
    if demand.model is None and len(named) > 1:
        return NotNow(Reason.AMBIGUOUS_MODEL)
    if demand.model is not None and named and demand.model not in named:
        return NotNow(Reason.UNKNOWN_MODEL)
    ready = _teams(
        w
        for w in workers
        if demand.model in (None, w.model)
        and w.worker_id not in demand.exclude
        and w.worker_id not in held
        and w.has_room(demand)
        and w.can_hold(demand)
    )
    return _choose(ready, policy, rng) if ready else _why_not(demand, workers)


def _why_not(demand: Demand, workers: Iterable[WorkerSnapshot]) -> NotNow:
    serving = [w for w in workers if demand.model in (None, w.model)]
    sufficient = [w for w in serving if w.can_hold(demand)]
    if _teams(serving) and not _teams(sufficient):
        return NotNow(Reason.TOO_LARGE)
    teams = _teams(
        w for w in sufficient if w.standing in TRUSTED and w.worker_id not in demand.exclude
    )
    if not teams:
        return NotNow(Reason.NO_WORKERS)
    return NotNow(Reason.BUSY, frozenset(w.worker_id for _, decodes in teams for w in decodes))


Team = tuple[Sequence[WorkerSnapshot], Sequence[WorkerSnapshot]]


def _teams(workers: Iterable[WorkerSnapshot]) -> list[Team]:
    """Prefill and decode workers that fit together; a colocated one is a team without prefill."""
    prefills: defaultdict[Compatibility, list[WorkerSnapshot]] = defaultdict(list)
    decodes: defaultdict[Compatibility, list[WorkerSnapshot]] = defaultdict(list)
    teams: list[Team] = []
    for worker in workers:
        if worker.role is Role.COLOCATED:
            teams.append(((), (worker,)))
        elif worker.role is Role.PREFILL:
            prefills[worker.compatibility].append(worker)
        else:
            decodes[worker.compatibility].append(worker)
    teams.extend((prefills[key], decodes[key]) for key in decodes if key in prefills)
    return teams


def _choose(teams: Sequence[Team], policy: PolicyName, rng: Random) -> Pair:
    """The policy's pair: its choice of each role within each team, then among the teams."""
    choose = _BY_NAME[policy]
    pairs = [
        Pair(choose(prefills, rng) if prefills else None, choose(decodes, rng))
        for prefills, decodes in teams
    ]
    return choose(pairs, rng)


def _least(candidates: Sequence[C], key: Callable[[C], int], rng: Random) -> C:
    least = min(map(key, candidates))
    return rng.choice([c for c in candidates if key(c) == least])


def _shortest_queue(candidates: Sequence[C], rng: Random) -> C:
    return _least(candidates, lambda c: c.queue_tokens, rng)


def _round_robin(candidates: Sequence[C], rng: Random) -> C:
    """The one whose turn is longest ago: fair also when workers come, go or are skipped."""
    return _least(candidates, lambda c: c.last_turn, rng)


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
