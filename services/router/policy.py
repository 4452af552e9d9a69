"""Placement policies: pure functions of a request, the workers and a random generator.

The default policy chooses the worker with the fewest queued tokens, as in "FDC: Fast KV
Dimensionality Compression for Efficient LLM Inference", sections 6.1 and 6.2. The queued tokens of
a worker are those in its last heartbeat plus those of promised placements
(`services.router.fleet`). The tokens of a slow worker count more, in proportion to its time per
token (`WorkerSnapshot.delay`). A prompt waits in the queue if a fast worker will compute it before
a free slow worker would. Among workers of equal speed, only the numbers of tokens are compared.

The prompt tokens that a worker is expected to have cached are subtracted from its queued tokens,
times `capacity.REUSE` (affinity, default policy only). A worker is therefore preferred to one with
a shorter queue only if the difference is at most this number of tokens. The limit on pending prompt
tokens does not apply to it while another worker is below the limit.

A prefill worker with ``decodes`` can serve a request alone, as a colocated worker does:

- Overflow, default policy only. The excess of a decode worker is its delay minus its
  ``overflow_tokens``. After a pair is chosen, its excess is compared with the shortest delay of a
  compatible prefill worker. If that delay is shorter, the prefill worker replaces the pair.
- Fallback, every policy. Prefill workers serve requests alone if no other worker can decode them
  now: the decode and colocated workers are full, not ready, or not registered.

If a request requires fewer output tokens than its maximum, small workers would end long outputs
early. Therefore, a worker is not used if its maximum output for the request is less than half of
the maximum output on the largest worker with capacity now. A request never waits for a larger
worker.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from operator import attrgetter
from random import Random
from types import MappingProxyType

from services.common.placement import Role
from services.router.capacity import REUSE, Demand, WorkerSnapshot, with_space
from services.router.choice import Delays, PolicyName, choose, shortest_queue
from services.router.roster import Needs, Pool, Shape


@dataclass(frozen=True, slots=True)
class Pair:
    """Workers of one request. If ``decode`` serves it alone, ``prefill`` is None.

    Attributes:
        cached: prompt tokens that workers are expected to have cached, by worker id.
    """

    prefill: WorkerSnapshot | None
    decode: WorkerSnapshot
    cached: Mapping[str, int] = field(default_factory=dict, compare=False)

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
        return sum(worker.delay(demand, role, self.expected(worker)) for worker, role in self.roles)

    def expected(self, worker: WorkerSnapshot) -> int:
        """Return the prompt tokens that one of the workers is expected to have cached."""
        return self.cached.get(worker.worker_id, 0)


NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})


def place(
    demand: Demand,
    pools: Iterable[Pool],
    policy: PolicyName,
    rng: Random,
    *,
    needs: Needs | None = None,
    reserved: Collection[str] = (),
    queued: int = 0,
    cached: Mapping[str, int] = NOTHING_CACHED,
) -> Pair | None:
    """Choose a compatible pair with capacity; return None if there is none.

    Args:
        pools: pools of the request's claim.
        needs: needs of the request that are known; others are added.
        reserved: ids of workers that must not decode the request, because earlier requests wait
            for their capacity. They may still compute its prompt.
        queued: prompt tokens of the other requests in the router's queue.
        cached: prompt tokens that workers are expected to have cached, by worker id. Only the
            default policy uses them.
    """
    if policy is not PolicyName.SHORTEST_QUEUE:
        cached = NOTHING_CACHED
    offers = _Offers(demand, pools, needs or Needs(demand), reserved, queued, cached)
    groups = offers.groups()
    return _choose(demand, _larger(demand, groups), policy, rng, cached) if groups else None


def can_serve(workers: Iterable[WorkerSnapshot]) -> bool:
    """Return whether one of the workers, or a compatible pair of them, can serve requests."""
    return any(_decoders(workers))


def context_length(workers: Iterable[WorkerSnapshot]) -> int | None:
    """Return the largest context length of the workers; None if they cannot serve requests."""
    return max((w.context_length for w in _decoders(workers)), default=None)


def _decoders(workers: Iterable[WorkerSnapshot]) -> Iterator[WorkerSnapshot]:
    """Yield the workers that can decode, alone or after a compatible prefill worker."""
    workers = list(workers)
    paired = {w.compatibility for w in workers if w.role is Role.PREFILL}
    for worker in workers:
        if Role.COLOCATED in worker.roles or (
            worker.role is Role.DECODE and worker.compatibility in paired
        ):
            yield worker


@dataclass(frozen=True, slots=True)
class _Group:
    """Compatible workers with capacity for a request, by role.

    Workers that would decode it are listed by the number of output tokens that fit on them.

    Attributes:
        alone: whether the workers are colocated.
    """

    alone: bool
    prefill: list[WorkerSnapshot]
    decode: dict[int, list[WorkerSnapshot]]
    colocated: dict[int, list[WorkerSnapshot]]

    @property
    def can_serve(self) -> bool:
        return bool(self.colocated or (self.prefill and self.decode))

    @property
    def is_fallback(self) -> bool:
        """Whether prefill workers must decode because no decode worker can."""
        return bool(self.prefill) and not self.decode

    @property
    def largest_output(self) -> int:
        """Output tokens that fit on the largest decoder.

        Prefill workers count only if there is no decode worker (`is_fallback`).
        """
        return max(self.decode if self.prefill and self.decode else self.colocated)

    def with_output(self, least: float) -> "_Group":
        """Return the group without decoders on which fewer than ``least`` output tokens fit."""
        decode, colocated = (
            {output: workers for output, workers in by_output.items() if output >= least}
            for by_output in (self.decode, self.colocated)
        )
        return _Group(self.alone, self.prefill, decode, colocated)


@dataclass(frozen=True, slots=True)
class _Offers:
    """Workers with capacity for one request. The attributes are the arguments of `place`."""

    demand: Demand
    pools: Iterable[Pool]
    needs: Needs
    reserved: Collection[str]
    queued: int
    cached: Mapping[str, int]

    def groups(self) -> list[_Group]:
        """Return the groups of workers that can serve the request."""
        found = []
        for pool in self.pools:
            decode = self._ready(pool, Role.DECODE)
            colocated = self._ready(pool, Role.COLOCATED)
            if decode or colocated:
                prefill = _all(self._ready(pool, Role.PREFILL))
                group = _Group(pool.alone, prefill, decode, colocated)
                if group.can_serve:
                    found.append(group)
        return found

    def _ready(self, pool: Pool, role: Role) -> dict[int, list[WorkerSnapshot]]:
        """Return the workers with capacity in a role, by the output tokens that fit on them."""
        by_output: dict[int, list[WorkerSnapshot]] = {}
        for shape in pool.shapes[role]:
            if shape.ready:
                output, workers = self._with_space(shape, role, shape.ready)
                if shape.slow and self.demand.may_wait:
                    workers = [
                        worker
                        for worker in workers
                        if worker.slowdown == 1.0 or not self._is_worth_waiting(worker, role)
                    ]
                if workers:
                    workers += self._backlogged(shape, role)
                    by_output.setdefault(output, []).extend(workers)
        return by_output

    def _backlogged(self, shape: Shape, role: Role) -> list[WorkerSnapshot]:
        """Return the workers with cached tokens of the prompt that have too many prompts now."""
        if not self.cached or role is Role.DECODE or len(shape.open) == len(shape.ready):
            return []
        names = self.cached.keys() & (shape.open.keys() - shape.ready.keys())
        found = {name: shape.open[name] for name in sorted(names)}
        return self._with_space(shape, role, found)[1]

    def _with_space(
        self, shape: Shape, role: Role, workers: Mapping[str, WorkerSnapshot]
    ) -> tuple[int, list[WorkerSnapshot]]:
        """Return the output tokens that fit, and the workers with space for them."""
        demand = self.demand
        output, pages = self.needs.on(shape, role)
        found = with_space(workers.values(), demand, role, pages) if output else []
        barred = [demand.exclude] if role is Role.PREFILL else [demand.exclude, self.reserved]
        for names in filter(None, barred):
            found = [worker for worker in found if worker.worker_id not in names]
        return output, found

    def _is_worth_waiting(self, slow: WorkerSnapshot, role: Role) -> bool:
        """Return whether workers at full speed would compute a prompt before a slow worker does.

        Workers at full speed have too many prompts now, so the prompt would wait in the queue. All
        queued prompts count, even those behind it: if the queue is long, slow workers are used.
        """
        fast = [
            worker
            for pool in self.pools
            for shape in pool.shapes[role]
            if shape.sample.compatibility == slow.compatibility
            for worker in self._with_space(shape, role, shape.open)[1]
            if worker.slowdown == 1.0
        ]
        delays = _delays_as(role, self.demand, self.cached)
        shortest = min(delays(fast), default=inf)
        return shortest + self.queued / max(1, len(fast)) < delays([slow])[0]


def _all(by_output: Mapping[int, list[WorkerSnapshot]]) -> list[WorkerSnapshot]:
    return list(chain.from_iterable(by_output.values()))


def _larger(demand: Demand, groups: list[_Group]) -> list[_Group]:
    """Return the groups without workers on which less than half of the largest output fits.

    All workers are kept for a request that requires all of its output tokens.
    """
    if demand.least_tokens >= demand.max_tokens:
        return groups
    regular = [group for group in groups if not group.is_fallback] or groups
    half = max(group.largest_output for group in regular) / 2
    larger = (group.with_output(half) for group in groups)
    return [group for group in larger if group.can_serve]


def _choose(
    demand: Demand,
    groups: Iterable[_Group],
    policy: PolicyName,
    rng: Random,
    cached: Mapping[str, int],
) -> Pair:
    """Apply the policy to each role within each group, then to the resulting pairs.

    Each colocated worker is an alternative to the pairs of all groups.
    """
    prefill, decode, alone = (_delays_as(role, demand, cached) for role in _ROLES)
    pairs: list[Pair] = []
    fallbacks: list[Pair] = []
    for group in groups:
        colocated = _all(group.colocated)
        if group.alone:
            pairs += [Pair(None, worker, cached) for worker in colocated]
        elif group.prefill and group.decode:
            decoders = _all(group.decode)
            chosen = (
                choose(policy, group.prefill, prefill, rng),
                choose(policy, decoders, decode, rng),
            )
            pair = Pair(*chosen, cached)
            if policy is PolicyName.SHORTEST_QUEUE:
                pair = _overflow(demand, pair, colocated, rng)
            pairs.append(pair)
        else:
            pair = Pair(None, choose(policy, colocated, alone, rng), cached)
            (fallbacks if group.is_fallback else pairs).append(pair)
    return choose(policy, pairs or fallbacks, lambda of: [pair.delay(demand) for pair in of], rng)


_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


_queue_tokens = attrgetter("queue_tokens")
_slowdown = attrgetter("slowdown")


def _delays_as(role: Role, demand: Demand, cached: Mapping[str, int]) -> Delays[WorkerSnapshot]:
    def delays(workers: Sequence[WorkerSnapshot]) -> list[float]:
        if max(map(_slowdown, workers), default=1.0) == 1.0:  # no Python call for each worker
            if not cached:
                return list(map(_queue_tokens, workers))
            return [w.queue_tokens - REUSE * cached.get(w.worker_id, 0) for w in workers]
        return [w.delay(demand, role, cached.get(w.worker_id, 0)) for w in workers]

    return delays


def _overflow(demand: Demand, pair: Pair, prefill: Sequence[WorkerSnapshot], rng: Random) -> Pair:
    """Replace the pair by one prefill worker if its delay is shorter than the decode excess.

    Args:
        prefill: prefill workers that can serve the request alone.
    """
    bound = pair.decode.overflow_tokens
    if bound is None or not prefill:
        return pair
    shortest = shortest_queue(prefill, _delays_as(Role.COLOCATED, demand, pair.cached), rng)
    alone = Pair(None, shortest, pair.cached)
    excess = pair.decode.delay(demand, Role.DECODE, pair.expected(pair.decode)) - bound
    return alone if alone.delay(demand) < excess else pair
