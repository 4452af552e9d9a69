"""The failure of a stream on a worker."""

from typing import Self

from headrace.v1 import error_pb2
from services.common.error_codes import UNREACHED, VERDICTS, Cause, Verdict, error_reason


def failure_reason(code: "error_pb2.ErrorCode.ValueType") -> str:
    """Return the name of a worker's error code, or ``worker_lost`` for UNSPECIFIED."""
    if code == error_pb2.ERROR_CODE_UNSPECIFIED:
        return "worker_lost"
    return error_reason(code)


class WorkerFailure(Exception):
    """A stream failed on a worker.

    Attributes:
        reason: metric label: the name of the error code, or ``worker_lost``.
        verdict: what to do about the failure.

    Args:
        code: the worker's error code, or UNSPECIFIED if the connection was lost.
        blame: id of the worker that failed, if it is known.
        reached: whether the worker may have received the stream.
    """

    def __init__(
        self,
        message: str,
        code: "error_pb2.ErrorCode.ValueType",
        blame: str | None,
        *,
        reached: bool = True,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.blame = blame
        self.reason = failure_reason(code)
        self.verdict = VERDICTS[code] if reached else UNREACHED
        self._reached = reached

    @property
    def may_have_computed(self) -> bool:
        """Whether the worker, or its prefill worker, may have computed a part of the prompt."""
        return self._reached and self.code != error_pb2.ERROR_CODE_OVERLOADED

    @classmethod
    def unfit(cls, message: str, worker_id: str) -> Self:
        """Return the failure of a worker whose model is not the one of the request.

        The request is placed again. Routers are not told, because the worker is sound.
        """
        failure = cls(message, error_pb2.ERROR_CODE_INCOMPATIBLE, worker_id, reached=False)
        failure.verdict = Verdict(Cause.CONGESTION)
        return failure

    @classmethod
    def of(cls, error: error_pb2.Error, worker_id: str) -> Self:
        """Return the failure of a worker's stream; an unknown error code becomes INTERNAL."""
        known = error.code and error.code in error_pb2.ErrorCode.values()
        code = error.code if known else error_pb2.ERROR_CODE_INTERNAL
        return cls(error.message, code, error.worker_id or worker_id)
