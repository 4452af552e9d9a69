"""Asks routers for places, and tells them when a placed request ended."""

import asyncio
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import httpx
import structlog
from pydantic import BaseModel, ValidationError

from services.common.errors import (
    InternalFault,
    Overloaded,
    QueueTimeout,
    ServiceError,
    TooLarge,
    Unavailable,
)
from services.common.placement import (
    ErrorCode,
    Outcome,
    Placement,
    PlaceRequest,
    Release,
    Role,
    RouterError,
    WorkerList,
)

log = structlog.get_logger()

_Answer = TypeVar("_Answer", bound=BaseModel)

_RETRY_AFTER_S = 1.0
_RELEASE_TRIES = 3


@dataclass(frozen=True)
class Placed:
    """A placement, and the router that made it: it alone knows of it."""

    placement: Placement
    router: str


class RouterClient:
    """Speaks to whichever router answers; the one that did last is asked first.

    Args:
        routers: base URLs.
        token: the cluster token, or None.
        timeout_s: to connect, and to answer beyond the time that a request may queue.
    """

    def __init__(
        self,
        routers: list[str],
        *,
        token: str | None,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._routers = [url.rstrip("/") for url in routers]
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
            transport=transport,
        )
        self._releases: set[asyncio.Task[None]] = set()

    async def place(self, request: PlaceRequest) -> Placed:
        """A pair of workers for a request; waits in the router's queue up to ``wait_s``.

        A router that cannot be reached, or knows no worker, is passed over for the next.

        Raises:
            Overloaded, QueueTimeout, TooLarge, Unavailable: as the router said.
            InternalFault: it did not understand us.
        """
        body = request.model_dump_json().encode()
        refusal: ServiceError = Unavailable("no router answers", retry_after_s=_RETRY_AFTER_S)
        for router in tuple(self._routers):
            try:
                placement = await self._post(
                    router, "place", body, Placement, self._timeout_s + request.wait_s
                )
            except httpx.TransportError as error:
                log.warning("router does not answer", router=router, error=repr(error))
            except Unavailable as error:
                refusal = error
            else:
                self._prefer(router)
                return Placed(placement, router)
        raise refusal

    def release(self, placed: Placed, outcome: Outcome, blame: str | None = None) -> None:
        """Tells the router, in the background, that a placed request ended."""
        message = Release(placement_id=placed.placement.placement_id, outcome=outcome, blame=blame)
        task = asyncio.create_task(self._release(placed.router, message.model_dump_json().encode()))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def can_place(self, model: str) -> bool:
        """Whether some router knows workers that are ready to serve a model."""
        for router in tuple(self._routers):
            try:
                response = await self._http.get(f"{router}/v1/workers")
                response.raise_for_status()
                known = WorkerList.model_validate_json(response.content)
            except (httpx.HTTPError, ValidationError) as error:
                log.debug("router does not tell", router=router, error=repr(error))
                continue
            roles = {w.role for w in known.workers if w.model == model and w.state == "ready"}
            if Role.COLOCATED in roles or {Role.PREFILL, Role.DECODE} <= roles:
                self._prefer(router)
                return True
        return False

    async def close(self) -> None:
        """After the last releases were told."""
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self._http.aclose()

    def _prefer(self, router: str) -> None:
        if self._routers[0] != router:
            self._routers.remove(router)
            self._routers.insert(0, router)

    async def _release(self, router: str, body: bytes) -> None:
        for attempt in range(_RELEASE_TRIES):
            try:
                response = await self._http.post(
                    f"{router}/v1/release", content=body, headers=_JSON
                )
                response.raise_for_status()
            except httpx.HTTPError as error:
                # Placements expire at the router: a lost release costs accuracy, not correctness.
                log.warning("release not told", router=router, error=repr(error))
                await asyncio.sleep(0.1 * 2**attempt)
            else:
                return

    async def _post(
        self, router: str, path: str, body: bytes, answer: type[_Answer], timeout_s: float
    ) -> _Answer:
        response = await self._http.post(
            f"{router}/v1/{path}",
            content=body,
            headers=_JSON,
            timeout=httpx.Timeout(self._timeout_s, read=timeout_s),
        )
        if response.status_code != httpx.codes.OK:
            _refuse(response)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise InternalFault(f"a router's answer is not understood: {error}") from error


_JSON = {"content-type": "application/json"}


def _refuse(response: httpx.Response) -> NoReturn:
    try:
        detail = RouterError.model_validate_json(response.content).error
    except ValidationError:
        raise Unavailable(
            f"a router answered {response.status_code}", retry_after_s=_RETRY_AFTER_S
        ) from None
    retry_after_s = _retry_after(response)
    match detail.code:
        case ErrorCode.QUEUE_TIMEOUT:
            raise QueueTimeout(detail.message)
        case ErrorCode.QUEUE_FULL:
            raise Overloaded(detail.message, retry_after_s=retry_after_s)
        case ErrorCode.TOO_LARGE:
            raise TooLarge(detail.message, param="prompt")
        case ErrorCode.NO_WORKERS | ErrorCode.UNKNOWN_MODEL | ErrorCode.INTERNAL:
            raise Unavailable(detail.message, retry_after_s=retry_after_s)
        case _:
            raise InternalFault(f"the router refused: {detail.message}")


def _retry_after(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("retry-after", _RETRY_AFTER_S))
    except ValueError:
        return _RETRY_AFTER_S
