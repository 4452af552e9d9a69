"""Client of the routers: places requests and reports when they end."""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import NoReturn

import aiohttp
import structlog
from pydantic import ValidationError

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
    WorkerView,
)

log = structlog.get_logger()

_RELEASE_ATTEMPTS = 3
_JSON = {"Content-Type": "application/json"}
_KEEP_ALIVE_S = 60.0  # shorter than the router's, so that this client closes idle connections


@dataclass(frozen=True)
class RoutedPlacement:
    """A placement and the URL of the router that made it. The release must go to that router."""

    placement: Placement
    router: str


class RouterClient:
    """Calls the routers in turn until one answers. The router that answered last is tried first.

    Must be created inside a running event loop.

    Args:
        routers: base URLs.
        token: cluster token, or None.
        timeout_s: maximum time in seconds to connect, and for an answer in addition to ``wait_s``.
    """

    def __init__(self, routers: list[str], *, token: str | None, timeout_s: float) -> None:
        self._routers = [url.rstrip("/") for url in routers]
        self._timeout_s = timeout_s
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        self._releases: set[asyncio.Task[None]] = set()

    async def place(self, request: PlaceRequest) -> RoutedPlacement:
        """Place a request. The router may queue it for up to ``request.wait_s`` seconds.

        Routers that are unreachable or have no workers are skipped.

        Raises:
            Overloaded, QueueTimeout, TooLarge, Unavailable: if no router places the request.
            InternalFault: if a router rejects the call as invalid.
        """
        body = request.model_dump_json().encode()
        refusal: ServiceError = Unavailable("no router is reachable")
        for router in tuple(self._routers):
            try:
                placement = await self._place(router, body, request.wait_s)
            except aiohttp.ClientError as error:
                log.warning("router does not answer", router=router, error=repr(error))
            except Unavailable as error:
                refusal = error
            else:
                self._prefer(router)
                return RoutedPlacement(placement, router)
        raise refusal

    def release(self, routed: RoutedPlacement, outcome: Outcome, blame: str | None = None) -> None:
        """Report the end of a placed request, in the background."""
        message = Release(placement_id=routed.placement.placement_id, outcome=outcome, blame=blame)
        task = asyncio.create_task(self._release(routed.router, message.model_dump_json().encode()))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def ready_workers(self, model: str) -> list[WorkerView]:
        """Return the ready workers of a model; none if no router has both of prefill and decode."""
        for router in tuple(self._routers):
            try:
                response, body = await self._request("GET", f"{router}/v1/workers")
                response.raise_for_status()
                known = WorkerList.model_validate_json(body)
            except (aiohttp.ClientError, ValidationError) as error:
                log.debug("router does not list workers", router=router, error=repr(error))
                continue
            ready = [w for w in known.workers if w.model == model and w.state == "ready"]
            alone = any(w.role is Role.COLOCATED or w.decodes for w in ready)
            if alone or {Role.PREFILL, Role.DECODE} <= {w.role for w in ready}:
                self._prefer(router)
                return ready
        return []

    async def close(self) -> None:
        """Send the outstanding releases, then close the connections."""
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self._http.close()

    def _prefer(self, router: str) -> None:
        if self._routers[0] != router:
            self._routers.remove(router)
            self._routers.insert(0, router)

    async def _release(self, router: str, body: bytes) -> None:
        for attempt in range(_RELEASE_ATTEMPTS):
            try:
                response, _ = await self._post(f"{router}/v1/release", body)
                response.raise_for_status()
            except aiohttp.ClientError as error:
                # A lost release only makes the router's load less accurate until the placement
                # expires.
                log.warning("release failed", router=router, error=repr(error))
                await asyncio.sleep(0.1 * 2**attempt)
            else:
                return

    async def _place(self, router: str, body: bytes, wait_s: float) -> Placement:
        response, answer = await self._post(f"{router}/v1/place", body, wait_s=wait_s)
        if response.status != HTTPStatus.OK:
            _raise_refusal(response, answer)
        try:
            return Placement.model_validate_json(answer)
        except ValidationError as error:
            raise InternalFault(f"invalid placement from a router: {error}") from error

    async def _post(
        self, url: str, body: bytes, *, wait_s: float = 0.0
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Call a router, a second time if the connection was closed before the answer.

        A router that stops closes its idle connections, and may do so while a call is sent on one.
        Whether it executed the call is unknown. A repetition is harmless: an unused placement
        expires, and a second release has no effect.
        """
        try:
            return await self._request("POST", url, body, wait_s=wait_s)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            log.debug("router closed a connection", url=url, error=repr(error))
            return await self._request("POST", url, body, wait_s=wait_s)

    async def _request(
        self, method: str, url: str, body: bytes | None = None, *, wait_s: float = 0.0
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the response and its body."""
        timeout = aiohttp.ClientTimeout(
            total=None, connect=self._timeout_s, sock_read=self._timeout_s + wait_s
        )
        async with self._http.request(
            method, url, data=body, headers=_JSON, timeout=timeout, allow_redirects=False
        ) as response:
            return response, await response.read()


def _raise_refusal(response: aiohttp.ClientResponse, body: bytes) -> NoReturn:
    try:
        detail = RouterError.model_validate_json(body).error
    except ValidationError:
        raise Unavailable(f"a router answered with HTTP status {response.status}") from None
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


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    try:
        return float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None
