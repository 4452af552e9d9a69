"""Index of the workers by what they can serve, kept up to date worker by worker.

Workers with the same model, role, compatibility and size have one `Shape`: the output tokens and
pages of a request are computed once for all of them. The shapes of compatible workers of a model
form a `Pool`. An event changes the entries of the workers that it concerns and no others.

The `Claim` of a request names the shapes that can serve it, not their workers, and does not depend
on the load. It remains valid while workers of a shape join and leave, except the last usable one.
Claims are computed again only when `Roster.version` has changed.
"""

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.pages.plan import PageCount
from services.common.placement import Role
from services.router.capacity import USABLE, Demand, WorkerSnapshot

MAX_CLAIMS = 1024
"""Maximum number of claims that are remembered to be shared among requests."""
_POOL_KEY = 3
"""Number of fields in the key of a pool. The key of a shape begins with these fields."""


class Reason(Enum):
    """Reason why a request is not placed. Waiting helps only if it is `BUSY`.

    Attributes:
        AMBIGUOUS_MODEL: several models are served, and the request names none.
    """

    UNKNOWN_MODEL = auto()
    AMBIGUOUS_MODEL = auto()
    TOO_LARGE = auto()
    NO_WORKERS = auto()
    BUSY = auto()


@dataclass(eq=False, slots=True)
class Pool:
    """Workers of one model that can serve requests together, or colocated workers.

    Attributes:
        alone: whether the workers are colocated. Each of them serves requests alone.
        shapes: the shapes of the pool, by role.
    """

    alone: bool
    shapes: dict[Role, list["Shape"]] = field(default_factory=lambda: {role: [] for role in Role})

    @property
    def is_open(self) -> bool:
        """Whether workers of the pool may have capacity for a request."""
        if any(shape.ready for shape in self.shapes[Role.COLOCATED]):
            return True
        pair = (self.shapes[Role.PREFILL], self.shapes[Role.DECODE])
        return all(any(shape.ready for shape in shapes) for shapes in pair)


@dataclass(eq=False, slots=True)
class Shape:
    """Workers with the same model, role, compatibility, size and options.

    Attributes:
        sample: one of the workers. Its load is not used.
        members: ids of all registered workers.
        usable: ids of the workers that take requests now or soon.
        open: workers that are ready and have a free slot.
        ready: the open workers that also take prompts now.
        slow: ids of the open workers that compute prompts and have a slowdown.
    """

    sample: WorkerSnapshot
    pool: Pool
    members: set[str] = field(default_factory=set)
    usable: dict[str, None] = field(default_factory=dict)
    open: dict[str, WorkerSnapshot] = field(default_factory=dict)
    ready: dict[str, WorkerSnapshot] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)


class Needs:
    """Needs of one request on each shape of workers, computed once."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._known: dict[tuple[Shape, Role], tuple[int, PageCount]] = {}

    def on(self, shape: Shape, role: Role) -> tuple[int, PageCount]:
        """Return the output tokens that fit and their pages; see `WorkerSnapshot.need`."""
        if (need := self._known.get((shape, role))) is None:
            need = self._known[shape, role] = shape.sample.need(self._demand, role)
        return need


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """The workers that can serve a request, regardless of their load.

    Requests that the same workers can serve share one claim.

    Attributes:
        reason: why the request can never be placed on these workers; `BUSY` if it can be placed,
            now or later.
        shapes: shapes of the workers that may decode the request.
        able: shapes of all workers that decode for the model, also if this request does not fit
            them.
        exclude: ids of workers that must not be used.
        pools: pools of ``shapes``.
    """

    reason: Reason
    shapes: tuple[Shape, ...] = ()
    able: tuple[Shape, ...] = ()
    exclude: frozenset[str] = frozenset()
    pools: tuple[Pool, ...] = ()

    @property
    def candidates(self) -> frozenset[str]:
        """Ids of the workers that may decode the request."""
        return frozenset[str]().union(*map(self._usable, self.shapes))

    @property
    def is_open(self) -> bool:
        """Whether a worker may have capacity for the request."""
        return any(pool.is_open for pool in self.pools)

    def is_blocked(self, reserved: Set[str]) -> bool:
        """Return whether all workers that could decode the request are reserved for others."""
        shapes = self.shapes if self.reason is Reason.BUSY else self.able
        names = [self._usable(shape) for shape in shapes]
        return any(names) and all(each <= reserved for each in names)

    def _usable(self, shape: Shape) -> Set[str]:
        """Return the ids of the usable workers of a shape that are not excluded."""
        names = shape.usable.keys()
        return names - self.exclude if self.exclude else names


class Roster:
    """The registered workers by `Shape`.

    Attributes:
        version: number of times that a shape was added or removed, got its first usable worker or
            lost its last one.
        changes: number of changes of the registered or usable workers.
        updates: number of changes of any worker, including changes of its load.
    """

    def __init__(self) -> None:
        self.version = self.changes = self.updates = 0
        self._shapes: dict[tuple[object, ...], Shape] = {}
        self._pools: dict[tuple[object, ...], Pool] = {}
        self._by_worker: dict[str, tuple[tuple[object, ...], Shape]] = {}
        self._claims: dict[tuple[object, ...], Claim] = {}

    def update(self, worker: WorkerSnapshot) -> None:
        """Set the state of a worker. It must have the same shape as in its last update."""
        self.updates += 1
        name = worker.worker_id
        known = self._by_worker.get(name)
        shape = known[1] if known else self._add(worker)
        if (worker.health in USABLE) is not (name in shape.usable):
            had_usable = bool(shape.usable)
            if worker.health in USABLE:
                shape.usable[name] = None
            else:
                del shape.usable[name]
            self._changed(bool(shape.usable) is not had_usable)
        is_open = worker.is_open
        _keep(shape.open, worker, is_open)
        _keep(shape.ready, worker, is_open and not worker.has_prompt_backlog)
        if is_open and worker.slowdown != 1.0 and worker.role is not Role.DECODE:
            shape.slow.add(name)
        else:
            shape.slow.discard(name)

    def remove(self, worker_id: str) -> None:
        """Remove a worker, if it is present."""
        if (known := self._by_worker.pop(worker_id, None)) is None:
            return
        key, shape = known
        had_usable = bool(shape.usable)
        shape.members.discard(worker_id)
        shape.slow.discard(worker_id)
        for entries in (shape.usable, shape.open, shape.ready):
            entries.pop(worker_id, None)
        if not shape.members:
            del self._shapes[key]
            for role in shape.sample.roles:
                shape.pool.shapes[role].remove(shape)
            if not any(shape.pool.shapes.values()):
                del self._pools[key[:_POOL_KEY]]
        self._changed(not shape.members or bool(shape.usable) is not had_usable)

    @property
    def has_slow(self) -> bool:
        """Whether an open worker that computes prompts has a slowdown."""
        return any(shape.slow for shape in self._shapes.values())

    def claim(self, demand: Demand, needs: Needs | None = None) -> Claim:
        """Return the workers that can serve a request, or why none can.

        Args:
            needs: needs of the request that are known; others are added.
        """
        needs = needs or Needs(demand)
        models = {shape.sample.model.name for shape in self._shapes.values()}
        serving = [s for s in self._shapes.values() if demand.model in (None, s.sample.model.name)]
        if demand.model is None and len(models) > 1:
            return self._claim(Reason.AMBIGUOUS_MODEL, (), serving, demand.exclude)
        if models and not serving:
            return self._claim(Reason.UNKNOWN_MODEL)
        offers = [(shape, role) for shape in serving for role in shape.sample.roles]
        fitting = [(s, role) for s, role in offers if needs.on(s, role)[0]]
        usable = [(s, role) for s, role in fitting if _has_others(s.usable, demand.exclude)]
        decoders = tuple(_decoders(usable))
        if decoders:
            return self._claim(Reason.BUSY, decoders, serving, demand.exclude)
        too_large = any(_decoders(offers)) and not any(_decoders(fitting))
        reason = Reason.TOO_LARGE if too_large else Reason.NO_WORKERS
        return self._claim(reason, (), serving, demand.exclude)

    def _claim(
        self,
        reason: Reason,
        candidates: tuple[Shape, ...] = (),
        serving: Iterable[Shape] = (),
        exclude: frozenset[str] = frozenset(),
    ) -> Claim:
        able = tuple(s for s in serving if s.sample.roles != (Role.PREFILL,))
        key = (reason, candidates, able, exclude)
        if (claim := self._claims.get(key)) is None:
            if len(self._claims) >= MAX_CLAIMS:
                self._claims = {}
            pools = tuple({shape.pool: None for shape in candidates})
            claim = self._claims[key] = Claim(reason, candidates, able, exclude, pools)
        return claim

    def _add(self, worker: WorkerSnapshot) -> Shape:
        pool_key = (worker.model.name, worker.compatibility, worker.role is Role.COLOCATED)
        size = (worker.pages_total, worker.max_running)
        key: tuple[object, ...] = (*pool_key, worker.role, worker.decodes, *size)
        if (shape := self._shapes.get(key)) is None:
            pool = self._pools.setdefault(pool_key, Pool(worker.role is Role.COLOCATED))
            shape = self._shapes[key] = Shape(worker, pool)
            for role in worker.roles:
                pool.shapes[role].append(shape)
        shape.members.add(worker.worker_id)
        self._by_worker[worker.worker_id] = (key, shape)
        self._changed(len(shape.members) == 1)
        return shape

    def _changed(self, of_shapes: bool) -> None:
        self.changes += 1
        self.updates += 1
        if of_shapes:
            self.version += 1
            self._claims = {}


def _keep(entries: dict[str, WorkerSnapshot], worker: WorkerSnapshot, kept: bool) -> None:
    if kept:
        entries[worker.worker_id] = worker
    else:
        entries.pop(worker.worker_id, None)


def _has_others(names: Collection[str], excluded: frozenset[str]) -> bool:
    """Return whether there are names that are not excluded."""
    return len(names) > len(excluded) or any(name not in excluded for name in names)


def _decoders(offers: Iterable[tuple[Shape, Role]]) -> Iterator[Shape]:
    """Yield the shapes that can decode a request, alone or with a prefill worker of their pool."""
    by_pool: dict[Pool, dict[Role, list[Shape]]] = {}
    for shape, role in offers:
        by_pool.setdefault(shape.pool, {}).setdefault(role, []).append(shape)
    for roles in by_pool.values():
        if Role.PREFILL in roles:
            yield from roles.get(Role.DECODE, ())
        yield from roles.get(Role.COLOCATED, ())
