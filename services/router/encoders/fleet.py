"""Registered encoder workers: their epochs, load, health, and the placements in progress.

There is no clock: methods take ``now``, in seconds of a monotonic clock.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from services.common.encoder_placement import (
    EncodePlacement,
    EncodePlaceRequest,
    EncoderHeartbeat,
    EncoderReadiness,
    EncoderRegistration,
    EncoderView,
)
from services.common.placement import Outcome, Release, WorkerAddress
from services.common.router_errors import ErrorCode
from services.router.capacity import USABLE, WorkerHealth
from services.router.encoders.policy import EncoderSnapshot
from services.router.encoders.tracked import TrackedEncoder
from services.router.epochs import Epochs, remember
from services.router.errors import Refusal
from services.router.fleet import FleetLimits

_MAX_NAMED = 4
"""Maximum number of workers that a reason names."""


@dataclass(frozen=True)
class _Record:
    worker: WorkerAddress
    placed_at: float


class EncoderFleet:
    """The current epoch of each encoder worker, and the placements in progress."""

    def __init__(self, limits: FleetLimits) -> None:
        self._limits = limits
        self._workers: dict[str, TrackedEncoder] = {}
        self._epochs = Epochs()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        # Ids of placements that were unknown when they were released.
        self._released: OrderedDict[str, None] = OrderedDict()
        self._placements = 0

    def register(self, registration: EncoderRegistration, now: float) -> None:
        """Register a worker. It takes requests after its first heartbeat.

        Raises:
            Refusal: if it would be suspect between its heartbeats, if the epoch has ended or was
                replaced, or if ``max_workers`` are registered.
        """
        self._limits.check_heartbeat(registration.heartbeat_s)
        worker_id, epoch = registration.worker_id, registration.epoch
        self._epochs.check(worker_id, epoch)
        if known := self._find(worker_id, epoch):
            known.registration = registration
            known.last_heartbeat_at = now
            return
        if worker_id not in self._workers:
            self._limits.check_room(len(self._workers), "encoder workers")
        self._epochs.begin(worker_id, epoch)
        self._workers[worker_id] = TrackedEncoder(registration, now)

    def heartbeat(self, beat: EncoderHeartbeat, now: float) -> bool:
        """Update the load of a worker; return False if it must register first.

        Raises:
            Refusal: if the epoch has ended or was replaced.
        """
        self._epochs.check(beat.worker_id, beat.epoch)
        if (worker := self._find(beat.worker_id, beat.epoch)) is None:
            return False
        worker.report(beat, now)
        return True

    def deregister(self, worker_id: str, epoch: str) -> None:
        """Remove a worker. Its epoch is rejected from now on, even if it was never registered."""
        self._epochs.end(worker_id, epoch)
        if self._find(worker_id, epoch) is not None:
            del self._workers[worker_id]

    def place(
        self, worker: EncoderSnapshot, request: EncodePlaceRequest, now: float
    ) -> EncodePlacement:
        """Create a placement on a worker of `candidates`, and count its tokens there."""
        self._placements += 1
        known = self._workers[worker.worker_id]
        known.place(request.placement_id, request.tokens, self._placements)
        address = known.registration.worker
        self._records[request.placement_id] = _Record(address, now)
        if len(self._records) > self._limits.max_placements:
            self._forget(*self._records.popitem(last=False))
        return EncodePlacement(
            placement_id=request.placement_id, worker=address, model=known.registration.model
        )

    def has_seen(self, placement_id: str) -> bool:
        """Return whether this placement is in progress, or was released before it was made."""
        return placement_id in self._records or placement_id in self._released

    def release(self, release: Release, now: float) -> float | None:
        """End a placement. Failure puts the worker on probation; success resets its backoff.

        Outcomes of placements made before the end of the last probation are ignored, so that many
        requests that fail together count as one failure.

        Returns:
            Time since the placement in seconds, or None if the placement is unknown.
        """
        record = self._records.pop(release.placement_id, None)
        if record is None:  # the release may have arrived before the call to place
            remember(self._released, release.placement_id, None)
            return None
        self._forget(release.placement_id, record)
        worker = self._find(record.worker.worker_id, record.worker.epoch)
        if worker is not None and record.placed_at >= worker.probation_until:
            if release.outcome is Outcome.OK:
                worker.failures = 0
            elif (
                release.outcome is Outcome.FAILED and release.blame == worker.registration.worker_id
            ):
                worker.probation_until = now + self._limits.probation_after(worker.failures)
                worker.failures += 1
        return now - record.placed_at

    def expire(self, now: float) -> list[WorkerAddress]:
        """Forget overdue placements. Remove workers without a recent heartbeat and return them."""
        while self._records:
            placement_id, record = next(iter(self._records.items()))
            if record.placed_at + self._limits.placement_ttl_s > now:
                break
            self._forget(placement_id, self._records.pop(placement_id))
        gone = [
            worker_id
            for worker_id, worker in self._workers.items()
            if now - worker.last_heartbeat_at > self._limits.gone_after_s
        ]
        return [self._workers.pop(worker_id).registration.worker for worker_id in gone]

    def candidates(self, request: EncodePlaceRequest, now: float) -> list[EncoderSnapshot]:
        """Return the state of the workers that may get a request, for the policy.

        They are those of its version of the model. If none of these is usable, they are all workers
        of the model.
        """
        workers = self._snapshots(request.model, now)
        same = [each for each in workers if each.model.model_hash == request.model_hash]
        return same if any(_is_usable(each, request) for each in same) else workers

    def _snapshots(self, model: str, now: float) -> list[EncoderSnapshot]:
        return [
            worker.snapshot(self._health(worker, now))
            for worker in self._workers.values()
            if worker.registration.model.name == model
        ]

    def views(self, now: float) -> list[EncoderView]:
        """Return the state of every worker, for operators."""
        return [worker.view(self._health(worker, now), now) for worker in self._workers.values()]

    @property
    def models(self) -> list[str]:
        """Names of the served encoders, sorted."""
        return sorted({worker.registration.model.name for worker in self._workers.values()})

    @property
    def idle(self) -> bool:
        """Whether no worker has work."""
        return not any(worker.queue_tokens for worker in self._workers.values())

    def refusal(self, request: EncodePlaceRequest, now: float) -> Refusal | None:
        """Return why no worker can ever take a request, or None if one can, now or later."""
        workers = self._snapshots(request.model, now)
        if not workers and self._workers:
            return Refusal(
                ErrorCode.UNKNOWN_MODEL, f"no encoder worker serves the model {request.model!r}"
            )
        if any(_is_usable(worker, request) for worker in workers):
            return None
        return Refusal(ErrorCode.NO_WORKERS, "no encoder worker is ready")

    def readiness(self, now: float) -> list[EncoderReadiness]:
        """Return the readiness of each registered encoder, sorted by name."""
        return [_readiness(model, self._snapshots(model, now)) for model in self.models]

    def _find(self, worker_id: str, epoch: str) -> TrackedEncoder | None:
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.registration.epoch == epoch else None

    def _forget(self, placement_id: str, record: _Record) -> None:
        if worker := self._find(record.worker.worker_id, record.worker.epoch):
            worker.forget(placement_id)

    def _health(self, worker: TrackedEncoder, now: float) -> WorkerHealth:
        return worker.health(now, self._limits.suspect_after_s)


def _is_usable(worker: EncoderSnapshot, request: EncodePlaceRequest) -> bool:
    return worker.health in USABLE and worker.worker_id not in request.exclude


def _readiness(model: str, workers: list[EncoderSnapshot]) -> EncoderReadiness:
    ready = [worker for worker in workers if worker.health is WorkerHealth.READY]
    if ready:
        infos = list(dict.fromkeys(worker.model for worker in ready))
        return EncoderReadiness(
            model=model,
            ready=True,
            infos=infos,
            batch_tokens=min(worker.batch_tokens for worker in ready),
        )
    states = ", ".join(_states(workers))
    return EncoderReadiness(
        model=model, ready=False, reason=f"no encoder worker is ready: {states}"
    )


def _states(workers: list[EncoderSnapshot]) -> Iterator[str]:
    for worker in workers[:_MAX_NAMED]:
        state = worker.health.value.replace("_", " ")
        reason = f" ({worker.reason})" if worker.reason else ""
        yield f"{worker.worker_id} is {state}{reason}"
    if len(workers) > _MAX_NAMED:
        yield f"{len(workers) - _MAX_NAMED} more"
