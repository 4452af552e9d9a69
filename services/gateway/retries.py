"""Failed attempts of a request, and the delay before the next one."""

import random
from dataclasses import dataclass, field

from headrace.v1 import error_pb2
from services.common.error_codes import Cause
from services.common.errors import Overloaded, ServiceError, Unavailable
from services.common.placement import WorkerAddress
from services.gateway.worker_failure import WorkerFailure

_BACKOFF_S = 0.05
"""Delay before the second attempt, seconds. It doubles with each further attempt."""
_MAX_BACKOFF_S = 1.0


@dataclass
class Retries:
    """Attempts of one request that did not complete it.

    Attributes:
        number: number of failed attempts.
        failures: number of those that count towards ``max_attempts``. An attempt that a draining
            worker ended after it had delivered tokens does not count: in a rolling restart, a long
            stream moves once for each worker.
        lost: workers that were lost. A worker that is lost in several attempts counts once.
        excluded: ids of workers that are used only as a last resort.
    """

    number: int = 0
    failures: int = 0
    lost: set[WorkerAddress] = field(default_factory=set)
    excluded: set[str] = field(default_factory=set)

    def add(self, failure: WorkerFailure, worker: WorkerAddress, *, progressed: bool) -> None:
        """Add an attempt that failed on ``worker``, before or after it had delivered tokens."""
        self.number += 1
        if failure.verdict.cause is Cause.LOSS:
            self.lost.add(worker)
        if progressed and failure.code == error_pb2.ERROR_CODE_DRAINING:
            self.excluded = {worker.worker_id}
        else:
            self.failures += 1
            self.excluded.add(worker.worker_id)


def backoff_s(failures: int) -> float:
    """Return the delay before the next attempt, in seconds.

    It is random, so that the requests of a lost worker do not all retry at the same time.
    """
    return float(min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (failures - 1)) * random.uniform(0.5, 1))


def final_error(
    failure: WorkerFailure, retries: Retries, *, max_attempts: int, max_lost_workers: int
) -> ServiceError | None:
    """Return the error with which a failure ends its request; None if the request is retried."""
    if failure.verdict.error is not None:
        return failure.verdict.error(failure.message)
    lost = len(retries.lost)
    if lost >= max_lost_workers:  # the request itself may be what crashes them
        return Unavailable(f"{lost} workers were lost during this request: {failure.message}")
    if retries.failures >= max_attempts:
        refused = failure.verdict.cause is Cause.REFUSAL
        error = Overloaded if refused else Unavailable
        return error(f"after {retries.failures} attempts: {failure.message}")
    return None
