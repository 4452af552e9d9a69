"""What the router refuses, and as which HTTP status.

Refusal                 a body that is a `RouterError`
├── Malformed           400  invalid
├── Unauthenticated     401  unauthenticated
├── UnknownModel        404  unknown_model
├── QueueTimeout        408  queue_timeout
├── StaleEpoch          409  stale_epoch
├── TooLarge            413  too_large
├── QueueFull           429  queue_full, with Retry-After
└── NoWorkers           503  no_workers, with Retry-After
"""

from typing import ClassVar

from services.common.placement import ErrorCode


class Refusal(Exception):
    """Why a call was not done. ``retry`` says whether the same call may succeed later."""

    status: ClassVar[int]
    code: ClassVar[ErrorCode]
    retry: ClassVar[bool] = False


class Malformed(Refusal):
    """A body that is not what `services.common.placement` describes."""

    status, code = 400, ErrorCode.INVALID


class Unauthenticated(Refusal):
    """No cluster token, or another one."""

    status, code = 401, ErrorCode.UNAUTHENTICATED


class UnknownModel(Refusal):
    """No worker serves a model of this name."""

    status, code = 404, ErrorCode.UNKNOWN_MODEL


class QueueTimeout(Refusal):
    """Waited for a place as long as the caller allowed."""

    status, code = 408, ErrorCode.QUEUE_TIMEOUT


class StaleEpoch(Refusal):
    """A life of a worker that has ended, or that a newer one replaced."""

    status, code = 409, ErrorCode.STALE_EPOCH


class TooLarge(Refusal):
    """A request that no worker could hold if it were empty, or a body past its bound."""

    status, code = 413, ErrorCode.TOO_LARGE


class QueueFull(Refusal):
    """Nothing fits now, and nobody more may wait."""

    status, code, retry = 429, ErrorCode.QUEUE_FULL, True


class NoWorkers(Refusal):
    """No pair of workers is there that could take the request, now or soon."""

    status, code, retry = 503, ErrorCode.NO_WORKERS, True
