"""Registered workers: their epochs, load, health, and promised placements.

A new placement is a promise on each of its workers, until the worker's heartbeat lists it as
admitted, the request is released, or ``placement_ttl_s`` has passed. It also ends if the heartbeat
of the decode worker says that the request has ended, and that on a prefill worker if it says that
the decode worker computes the prompt itself, or asks for it later. The load of a worker
is the load in its last heartbeat plus its promises. No placement is counted twice.

Changed workers are noted, and `Fleet.roster` updates only their entries in the index of the workers
(see `services.router.roster`). Changes of health that only depend on the time are noted when they
are due.

There is no clock: methods take ``now``, in seconds of a monotonic clock.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from services.common.listings import WorkerView
from services.common.placement import (
    Heartbeat,
    ModelInfo,
    Outcome,
    Placement,
    Registration,
    Release,
    Role,
    StepPace,
    WorkerAddress,
)
from services.common.router_errors import ErrorCode
from services.router.capacity import Demand, WorkerHealth, WorkerSnapshot
from services.router.epochs import Epochs, remember
from services.router.errors import Refusal
from services.router.matching import unmatched
from services.router.policy import Pair
from services.router.prefix_memory import PrefixMemory
from services.router.roster import Roster
from services.router.speed import slowdown
from services.router.tracked_worker import TrackedWorker

MAX_COMPARED = 64
"""Maximum number of other workers with which the speed of a worker is compared."""


@dataclass(frozen=True)
class FleetLimits:
    """Limits of a fleet; times in seconds. `RouterSettings` documents them."""

    suspect_after_s: float = 2.0
    gone_after_s: float = 10.0
    probation_s: float = 0.5
    probation_max_s: float = 30.0
    placement_ttl_s: float = 30.0
    max_placements: int = 65_536
    max_workers: int = 1024
    backlog: float = 1.25
    prompt_backlog_s: float = 0.25
    remembered_blocks: int = 4096

    def check_heartbeat(self, heartbeat_s: float) -> None:
        """Raise a `Refusal` if a worker would be suspect between its heartbeats, or after one."""
        if 2 * heartbeat_s > self.suspect_after_s:
            raise Refusal(
                ErrorCode.INVALID,
                f"heartbeat_s is {heartbeat_s:g}, but at most half of suspect_after_s "
                f"({self.suspect_after_s:g}) of this router is allowed",
            )

    def check_room(self, registered: int, kind: str = "workers") -> None:
        """Raise a `Refusal` if there are too many workers to register another one."""
        if registered >= self.max_workers:
            raise Refusal(
                ErrorCode.QUEUE_FULL,
                f"{self.max_workers} {kind} are registered, the limit is max_workers",
            )

    def probation_after(self, failures: int) -> float:
        """Return how long a worker is on probation after another failure, seconds.

        Args:
            failures: number of failures before it, since the last success.
        """
        return min(self.probation_s * 2.0 ** min(failures, 64), self.probation_max_s)


@dataclass(frozen=True)
class _PlacementRecord:
    placement: Placement
    placed_at: float

    @property
    def addresses(self) -> Iterator[WorkerAddress]:
        if self.placement.prefill is not None:
            yield self.placement.prefill
        yield self.placement.decode


class Fleet:
    """The current epoch of each worker, and the placements in progress."""

    def __init__(self, limits: FleetLimits) -> None:
        self._limits = limits
        self._workers: dict[str, TrackedWorker] = {}
        self._epochs = Epochs()
        self._records: OrderedDict[str, _PlacementRecord] = OrderedDict()
        # Ids of placements that were unknown when they were released.
        self._released: OrderedDict[str, None] = OrderedDict()
        # The times at which promises expire, by placement id, the earliest first.
        self._expiries: OrderedDict[str, float] = OrderedDict()
        self._placements = 0
        # Caches, which are reset when a worker is registered or removed.
        self._unmatched: dict[str, str] | None = None
        self._peers: dict[tuple[Role, str], list[TrackedWorker]] = {}
        self._roster = Roster()
        # Ids of the workers that have changed since the roster was updated.
        self._changed: dict[str, None] = {}
        # Heap of the times at which the health of a worker may change, with its id.
        self._timers: list[tuple[float, str]] = []

    @property
    def unmatched(self) -> dict[str, str]:
        """Workers without a partner, and the reason; see `services.router.matching`."""
        if self._unmatched is None:
            self._unmatched = unmatched([w.registration for w in self._workers.values()])
        return self._unmatched

    def register(self, registration: Registration, now: float) -> None:
        """Register a worker. It takes requests after its first heartbeat.

        Raises:
            Refusal: if it would be suspect between its heartbeats, or after a late one, if the
                epoch has ended or was replaced, or if ``max_workers`` are registered.
        """
        self._limits.check_heartbeat(registration.heartbeat_s)
        self._epochs.check(registration.worker_id, registration.epoch)
        worker_id, epoch = registration.worker_id, registration.epoch
        known = self._find(worker_id, epoch)
        if known and known.registration.compatibility == registration.compatibility:
            known.registration = registration
            known.last_heartbeat_at = now
            known.snapshot = None
            if known.suspect_at is None:
                self._time(known)
            self._registrations_changed(worker_id)
            return
        if worker_id not in self._workers:
            self._limits.check_room(len(self._workers))
        self._epochs.begin(worker_id, epoch)
        plan, pages = registration.compatibility.page_plan, registration.page_count
        blocks = self._limits.remembered_blocks if registration.reuses_prefixes else 0
        prefixes = PrefixMemory(blocks, plan.max_tokens(pages))
        self._workers[worker_id] = TrackedWorker(registration, now, prefixes)
        self._registrations_changed(worker_id)

    def heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """Update the load of a worker; return False if it must register first.

        Raises:
            Refusal: if the epoch has ended or was replaced, or if the heartbeat does not have the
                page groups of the registration.
        """
        self._epochs.check(beat.worker_id, beat.epoch)
        worker = self._find(beat.worker_id, beat.epoch)
        if worker is None:
            return False
        try:
            worker.report(beat, now)
        except ValueError as error:
            raise Refusal(ErrorCode.INVALID, f"pages_free: {error}") from None
        self._changed[beat.worker_id] = None
        if worker.suspect_at is None:
            self._time(worker)
        worker.slowdown = slowdown(beat.pace, islice(self._paces_beside(worker), MAX_COMPARED))
        for placement_id in beat.admitted:
            worker.admit(placement_id, now)
        for placement_id in beat.computed_here:
            self._end_prefill(placement_id, beat.worker_id, is_computed=False)
        for placement_id in beat.postponed:
            self._end_prefill(placement_id, beat.worker_id, is_computed=True)
        for placement_id in beat.ended:
            if record := self._records.get(placement_id):
                self._end_promises(record, are_computed=False)
        return True

    def deregister(self, worker_id: str, epoch: str) -> None:
        """Remove a worker. Its epoch is rejected from now on, even if it was never registered."""
        self._epochs.end(worker_id, epoch)
        if self._find(worker_id, epoch) is not None:
            del self._workers[worker_id]
            self._registrations_changed(worker_id)

    def promise(self, pair: Pair, demand: Demand, placement_id: str, now: float) -> Placement:
        """Create a placement on a pair from `snapshots`, and add it to the load of its workers."""
        self._placements += 1
        decode, role = pair.roles[-1]
        max_tokens, _ = decode.need(demand, role)
        prefill = self._workers[pair.prefill.worker_id].registration if pair.prefill else None
        placement = Placement(
            placement_id=placement_id,
            prefill=prefill.worker if prefill else None,
            decode=self._workers[pair.decode.worker_id].registration.worker,
            max_tokens=max_tokens,
            model=decode.model,
        )
        for worker, role in pair.roles:
            known = self._workers[worker.worker_id]
            cached = pair.expected(worker)
            known.promise(placement_id, demand, role, max_tokens, self._placements, now, cached)
            self._changed[worker.worker_id] = None
        self._records[placement_id] = _PlacementRecord(placement, now)
        self._expiries[placement_id] = now + self._limits.placement_ttl_s
        if len(self._records) > self._limits.max_placements:
            self._end_promises(self._records.popitem(last=False)[1], are_computed=True)
        return placement

    def cached(self, demand: Demand) -> dict[str, int]:
        """Return the prompt tokens that each worker is expected to have cached, by its id.

        Workers without any are left out. At least one token of a prompt must be computed.
        """
        prefix, most = demand.prefix, demand.prompt_tokens - 1
        if not prefix:
            return {}
        known = {
            worker_id: tokens
            for worker_id, worker in self._workers.items()
            if (tokens := worker.prefixes.known_tokens(prefix))
        }
        if max(known.values(), default=0) > most:
            return {worker_id: min(tokens, most) for worker_id, tokens in known.items()}
        return known

    def has_seen(self, placement_id: str) -> bool:
        """Return whether this placement is in progress, or was released before it was made."""
        return placement_id in self._records or placement_id in self._released

    def release(self, release: Release, now: float) -> float | None:
        """End a placement. Failure puts the blamed worker on probation; success resets its backoff.

        Outcomes of placements made before the end of the last probation are ignored, so that many
        requests that fail together count as one failure.

        Returns:
            Time since the placement in seconds, or None if the placement is unknown.
        """
        record = self._records.pop(release.placement_id, None)
        if record is None:  # the release may have arrived before the call to place
            remember(self._released, release.placement_id, None)
            return None
        self._end_promises(record, are_computed=release.outcome is Outcome.OK)
        for address in record.addresses:
            worker = self._find(address.worker_id, address.epoch)
            if worker is None or record.placed_at < worker.probation_until:
                continue
            if release.outcome is Outcome.OK:
                worker.failures = 0
            elif release.outcome is Outcome.FAILED and release.blame == address.worker_id:
                worker.probation_until = now + self._limits.probation_after(worker.failures)
                self._changed[address.worker_id] = None
                heappush(self._timers, (worker.probation_until, address.worker_id))
                worker.failures += 1
        return now - record.placed_at

    def expire(self, now: float) -> list[WorkerAddress]:
        """Drop expired promises. Remove workers without a recent heartbeat and return them."""
        while self._expiries:
            placement_id, expiry = next(iter(self._expiries.items()))
            if expiry > now:
                break
            self._end_promises(self._records[placement_id], are_computed=False)
        gone = [
            worker_id
            for worker_id, worker in self._workers.items()
            if now - worker.last_heartbeat_at > self._limits.gone_after_s
        ]
        removed = [self._workers.pop(worker_id).registration.worker for worker_id in gone]
        for worker_id in gone:
            self._registrations_changed(worker_id)
        return removed

    def roster(self, now: float) -> Roster:
        """Return the workers for the policy. The next call updates and returns the same object."""
        self._note_health(now)
        for worker_id in self._changed:
            if worker := self._workers.get(worker_id):
                self._roster.update(self._snapshot(worker, now))
        self._changed.clear()
        return self._roster

    def snapshots(self, now: float) -> list[WorkerSnapshot]:
        """Return the state of every worker, for the policy."""
        return [self._snapshot(worker, now) for worker in self._workers.values()]

    def views(self, now: float) -> list[WorkerView]:
        """Return the state of every worker, for operators."""
        reasons = self.unmatched
        return [
            worker.view(self._health(worker, now), reasons.get(worker_id), now)
            for worker_id, worker in self._workers.items()
        ]

    @property
    def idle(self) -> bool:
        """Whether no worker has work, reported or promised."""
        return not any(worker.busy for worker in self._workers.values())

    def models(self) -> list[ModelInfo]:
        """Return the served models, sorted by name."""
        named = {w.registration.model.name: w.registration.model for w in self._workers.values()}
        return [named[name] for name in sorted(named)]

    def _find(self, worker_id: str, epoch: str) -> TrackedWorker | None:
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.registration.epoch == epoch else None

    def _end_promises(self, record: _PlacementRecord, *, are_computed: bool) -> None:
        """Remove the promises of a placement.

        Args:
            are_computed: whether the prompt counts as cached on workers that have not listed it.
        """
        self._expiries.pop(record.placement.placement_id, None)
        for address in record.addresses:
            self._end_promise(record.placement.placement_id, address, is_computed=are_computed)

    def _end_prefill(self, placement_id: str, decode_id: str, *, is_computed: bool) -> None:
        """Remove the promise on the prefill worker of a placement, as its decode worker says.

        Args:
            is_computed: whether the prefill worker will compute the prompt, though later.
        """
        record = self._records.get(placement_id)
        if record is None or record.placement.decode.worker_id != decode_id:
            return
        if address := record.placement.prefill:
            self._end_promise(placement_id, address, is_computed=is_computed)

    def _end_promise(self, placement_id: str, address: WorkerAddress, *, is_computed: bool) -> None:
        if worker := self._find(address.worker_id, address.epoch):
            end = worker.forget if is_computed else worker.withdraw
            if end(placement_id):
                self._changed[address.worker_id] = None

    def _registrations_changed(self, worker_id: str) -> None:
        """Note that a worker was registered or removed, which may change the partners of others."""
        self._roster.remove(worker_id)
        self._unmatched = None
        self._peers = {}
        self._changed = dict.fromkeys(self._workers)

    def _time(self, worker: TrackedWorker) -> None:
        """Set the time at which a worker becomes suspect unless it sends another heartbeat."""
        worker.suspect_at = worker.last_heartbeat_at + self._limits.suspect_after_s
        heappush(self._timers, (worker.suspect_at, worker.registration.worker_id))

    def _note_health(self, now: float) -> None:
        """Note the workers whose health may have changed because a time limit has passed."""
        timed = []
        while self._timers and self._timers[0][0] <= now:
            time, worker_id = heappop(self._timers)
            if worker := self._workers.get(worker_id):
                self._changed[worker_id] = None
                if time == worker.suspect_at:
                    worker.suspect_at = None
                    if now - worker.last_heartbeat_at <= self._limits.suspect_after_s:
                        timed.append(worker)
        for worker in timed:
            self._time(worker)

    def _paces_beside(self, worker: TrackedWorker) -> Iterator[StepPace]:
        """Yield the pace of each other worker whose speed can be compared with that of this one."""
        if (peers := self._peers.get(worker.kind)) is None:
            peers = [other for other in self._workers.values() if other.kind == worker.kind]
            self._peers[worker.kind] = peers
        for other in peers:
            if other is not worker and other.load and other.load.pace:
                yield other.load.pace

    def _health(self, worker: TrackedWorker, now: float) -> WorkerHealth:
        matched = worker.registration.worker_id not in self.unmatched
        return worker.health(now, self._limits.suspect_after_s, matched=matched)

    def _snapshot(self, worker: TrackedWorker, now: float) -> WorkerSnapshot:
        health = self._health(worker, now)
        if worker.snapshot is None or worker.snapshot.health is not health:
            unmatched = self.unmatched.get(worker.registration.worker_id)
            limits = self._limits
            return worker.take_snapshot(health, unmatched, limits.backlog, limits.prompt_backlog_s)
        return worker.snapshot
