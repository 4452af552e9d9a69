"""``/health`` and ``/ready``: liveness and readiness for kubelets, load balancers and operators.

All services answer with the same JSON. Neither path needs a cluster token or an API key.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Final

ANSWER_S: Final = 5.0
"""Time in which the event loop must answer a probe, seconds."""
RETRY_AFTER_S: Final = 1
"""``Retry-After`` of a service that is not ready, seconds."""

PATHS: Final = ("/health", "/ready")

Check = Callable[[], Coroutine[Any, Any, str | None]]


def health_answer(failure: str | None) -> tuple[int, dict[str, str]]:
    """Return the status and JSON of ``/health``.

    Args:
        failure: why the process must be restarted, or None while it works.
    """
    return (200, {"status": "ok"}) if failure is None else _refusal("failed", failure)


def ready_answer(reason: str | None) -> tuple[int, dict[str, str]]:
    """Return the status and JSON of ``/ready``.

    Args:
        reason: why the service must get no requests now, or None if it is ready.
    """
    return (200, {"status": "ready"}) if reason is None else _refusal("not ready", reason)


def _refusal(status: str, reason: str) -> tuple[int, dict[str, str]]:
    return 503, {"status": status, "reason": reason}


class Probes:
    """Checks that run on the event loop, for servers in other threads.

    A loop that does not answer within `ANSWER_S` fails both probes. Must be created on that loop.

    Args:
        not_ready: see `ready_answer`.
        failure: see `health_answer`; default: the process works while its event loop answers.
    """

    def __init__(self, not_ready: Check, failure: Check | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._not_ready = not_ready
        self._failure = failure or _no_failure

    def answer(self, path: str) -> tuple[int, dict[str, str]]:
        """Return the status and JSON for one of `PATHS`. Blocks; not to be called on the loop."""
        if path == "/health":
            return health_answer(self._ask(self._failure))
        return ready_answer(self._ask(self._not_ready))

    def app(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """WSGI application of both paths."""
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return []
        if environ["PATH_INFO"] not in PATHS:
            start_response("404 Not Found", [])
            return []
        status, body = self.answer(environ["PATH_INFO"])
        headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
        if status == 200:
            start_response("200 OK", headers)
        else:
            start_response(
                "503 Service Unavailable", [*headers, ("Retry-After", str(RETRY_AFTER_S))]
            )
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [json.dumps(body).encode()]

    def _ask(self, check: Check) -> str | None:
        """Return the result of ``check``, or why there is none."""
        checking = check()
        try:
            answer: Future[str | None] = asyncio.run_coroutine_threadsafe(checking, self._loop)
        except RuntimeError:  # the loop is closed
            checking.close()
            return "stopping"
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            answer.cancel()
            return f"the event loop has not answered for {ANSWER_S:g} s"
        except CancelledError:
            return "stopping"


async def _no_failure() -> str | None:
    return None
