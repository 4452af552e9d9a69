"""Client of the routers: places requests and reports when they end."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Generic, TypeVar

import aiohttp
import structlog
from pydantic import ValidationError

from services.common.encoder_placement import EncodePlacement, EncodePlaceRequest, EncoderList
from services.common.errors import ServiceError, Unavailable
from services.common.listings import ModelReadiness, ReadinessList, WorkerList
from services.common.messages import Message
from services.common.placement import Outcome, Placement, PlaceRequest, Release, new_placement_id
from services.common.prefix_hashes import HEADER, encode_hashes
from services.common.tls import MutualTls
from services.gateway.router_answers import NoRouter, parse_answer
from services.gateway.router_connections import RouterConnector

log = structlog.get_logger()

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_RELEASE_ATTEMPTS = 3
PROBE_PERIOD_S = 1.0
"""Time without an answer after which a router with a waiting call is probed, seconds."""
_PROBE_TIMEOUT_S = 2.0
_MAX_NAMED = 4
"""Maximum number of models that a reason names."""
_JSON = {"Content-Type": "application/json"}


P = TypeVar("P", Placement, EncodePlacement)


@dataclass(frozen=True)
class _Kind(Generic[P]):
    """Calls for one kind of placements: the beginning of their paths, and the answer's class."""

    path: str
    answer: type[P]


_GENERATION = _Kind("/v1", Placement)
_ENCODING = _Kind("/v1/encoders", EncodePlacement)


@dataclass(eq=False)
class Routed(Generic[P]):
    """A placement and the URL of the router that made it. The end of a ``with`` block releases it.

    Attributes:
        outcome, blame: result that the release reports; see `Release`.
    """

    placement: P
    router: str
    release: Callable[[str, Release], None]
    outcome: Outcome = Outcome.CANCELLED
    blame: str | None = None

    def __enter__(self) -> "Routed[P]":
        return self

    def __exit__(self, *_error: object) -> None:
        placement_id = self.placement.placement_id
        self.release(
            self.router,
            Release(placement_id=placement_id, outcome=self.outcome, blame=self.blame),
        )


RoutedPlacement = Routed[Placement]
RoutedEncode = Routed[EncodePlacement]


class RouterClient:
    """Calls the routers in turn until one answers. The router that answered last is tried first.

    If `place` ends without an answer, for example because it was cancelled, the router may have
    placed the request. The placement is then released, so that no router counts a request that will
    not be sent.

    Must be created inside a running event loop.

    Args:
        routers: base URLs.
        token: cluster token, or None.
        tls: certificates for mutual TLS, or None.
        timeout_s: maximum time in seconds to open a connection, and for an answer in addition to
            ``wait_s``.
    """

    def __init__(
        self,
        routers: list[str],
        *,
        token: str | None,
        timeout_s: float,
        tls: MutualTls | None = None,
    ) -> None:
        self._routers = [url.rstrip("/") for url in routers]
        self._timeout_s = timeout_s
        # Probes and listings do not wait for the connections of a burst of calls.
        self._calls, self._checks = _open_session(token, tls), _open_session(token, tls)
        self._releases: set[asyncio.Task[None]] = set()
        self._probes: dict[str, asyncio.Task[object]] = {}
        # The reason that was logged last for each router.
        self._refusals: dict[str, str] = {}
        # The event-loop time of each router's last answer, seconds.
        self._answered: dict[str, float] = {}

    async def place(
        self,
        request: PlaceRequest,
        trace: Mapping[str, str] | None = None,
        prefix: Sequence[bytes] = (),
    ) -> RoutedPlacement:
        """Place a request. The router may queue it for up to ``request.wait_s`` seconds.

        The caller must enter the result, as in ``with await client.place(request) as routed``.

        Routers that are unreachable or have no workers are skipped. A call that waits in a queue
        keeps its position while its router answers probes.

        Args:
            trace: headers of the span whose child the router's span will be.
            prefix: hashes of the beginning of the prompt, see `services.common.prefix_hashes`.

        Raises:
            NoRouter: if every router is unreachable, has just started or shuts down.
            Overloaded, QueueTimeout, TooLarge, Unavailable: if no router places the request.
            InternalFault: if a router rejects the call as invalid.
        """
        headers = dict(trace or {})
        if prefix:
            headers[HEADER] = encode_hashes(prefix)
        return await self._route(_GENERATION, request, headers)

    async def place_inputs(
        self, request: EncodePlaceRequest, trace: Mapping[str, str] | None = None
    ) -> RoutedEncode:
        """Place inputs on an encoder worker; otherwise as `place`."""
        return await self._route(_ENCODING, request, dict(trace or {}))

    async def _route(
        self, kind: _Kind[P], request: PlaceRequest | EncodePlaceRequest, headers: dict[str, str]
    ) -> Routed[P]:
        until = _now() + request.wait_s
        refusal: ServiceError = NoRouter("no router is reachable")
        for router in tuple(self._routers):
            left_s = min(request.wait_s, max(0.0, until - _now()))
            try:
                call = request.model_copy(update={"wait_s": left_s})
                placement = await _twice(partial(self._place, router, kind, call, headers))
            except aiohttp.ClientError as error:
                log.warning("router does not answer", router=router, error=repr(error))
            except Unavailable as error:
                if isinstance(refusal, NoRouter):
                    refusal = error
            else:
                self._prefer(router)
                return Routed(placement, router, partial(self._release, kind.path))
        raise refusal

    async def readiness(self, model: str) -> ModelReadiness:
        """Return whether a router can place requests for a model, or the reason why none can."""
        refusal, failure = None, "no router answers"
        for router in tuple(self._routers):
            try:
                response, body = await self._request(
                    "GET",
                    f"{router}/v1/readiness",
                    timeout_s=min(self._timeout_s, _PROBE_TIMEOUT_S),
                )
                response.raise_for_status()
                found = _readiness(model, ReadinessList.model_validate_json(body).models)
            except (aiohttp.ClientError, ValidationError) as error:
                log.debug("router does not report readiness", router=router, error=repr(error))
                if cause := _refusal(error):
                    failure = f"no router answers: {cause}"
                    if self._refusals.get(router) != cause:
                        log.warning("router does not answer", router=router, error=repr(error))
                        self._refusals[router] = cause
                continue
            self._refusals.pop(router, None)
            if found.ready:
                self._prefer(router)
                return found
            refusal = refusal or found
        return refusal or ModelReadiness(model=model, ready=False, reason=failure)

    async def workers(self) -> WorkerList | None:
        """Return the workers as the preferred router sees them, or None if no router answers."""
        for router in tuple(self._routers):
            if listed := await self._list(router, "/v1/workers", WorkerList):
                return listed
        return None

    async def encoders(self, model: str) -> EncoderList | None:
        """Return the encoder workers and their models, or None if no router answers.

        A router that can place requests for ``model`` is preferred.
        """
        first = None
        for router in tuple(self._routers):
            if listed := await self._list(router, "/v1/encoders", EncoderList):
                if any(each.ready for each in listed.models if each.model == model):
                    return listed
                first = first or listed
        return first

    async def _list(self, router: str, path: str, listing: type[M]) -> M | None:
        """Return what a router lists, or None if it does not answer."""
        try:
            response, body = await self._request(
                "GET", f"{router}{path}", timeout_s=min(self._timeout_s, _PROBE_TIMEOUT_S)
            )
            response.raise_for_status()
            return listing.model_validate_json(body)
        except (aiohttp.ClientError, ValidationError) as error:
            log.debug("router does not list", path=path, router=router, error=repr(error))
            return None

    async def close(self) -> None:
        """Send the outstanding releases, then close the connections."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._releases, *self._probes.values(), return_exceptions=True)
        await self._calls.close()
        await self._checks.close()

    def _prefer(self, router: str) -> None:
        if self._routers[0] != router:
            self._routers.remove(router)
            self._routers.insert(0, router)

    def _release(self, path: str, router: str, message: Release) -> None:
        """Report the end of a placed request, in the background."""
        url = f"{router}{path}/release"
        task = asyncio.create_task(self._post_release(url, message.model_dump_json().encode()))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _post_release(self, url: str, body: bytes) -> None:
        call = partial(self._request, "POST", url, body, timeout_s=self._timeout_s)
        for attempt in range(_RELEASE_ATTEMPTS):
            try:
                response, _ = await _twice(call)
                response.raise_for_status()
            except aiohttp.ClientError as error:
                # A lost release only makes the router's load less accurate until the placement
                # expires.
                log.warning("release failed", url=url, error=repr(error))
                await asyncio.sleep(0.1 * 2**attempt)
            else:
                return

    async def _place(
        self,
        router: str,
        kind: _Kind[P],
        request: PlaceRequest | EncodePlaceRequest,
        headers: Mapping[str, str],
    ) -> P:
        """Call one router, under a new placement id.

        Raises:
            aiohttp.ClientError: if the router does not answer.
            ServiceError: if it refuses.
        """
        request = request.model_copy(update={"placement_id": new_placement_id()})
        answering = asyncio.create_task(
            self._request(
                "POST",
                f"{router}{kind.path}/place",
                request.model_dump_json().encode(),
                timeout_s=self._timeout_s + request.wait_s,
                headers=headers,
            )
        )
        try:
            while not (await asyncio.wait({answering}, timeout=PROBE_PERIOD_S))[0]:
                await self._probe(router)
            response, answer = answering.result()
            self._answered[router] = _now()
            placed = parse_answer(response, answer, request.placement_id, kind.answer)
        except BaseException:
            if _was_sent(answering):
                unused = Release(placement_id=request.placement_id, outcome=Outcome.CANCELLED)
                self._release(kind.path, router, unused)
            answering.cancel()
            raise
        if isinstance(placed, ServiceError):
            raise placed
        return placed

    async def _probe(self, router: str) -> None:
        """Check that a router answers, unless it has done so within `PROBE_PERIOD_S`.

        Concurrent callers share one probe.

        Raises:
            aiohttp.ClientError: if it does not answer.
        """
        if _now() - self._answered.get(router, float("-inf")) < PROBE_PERIOD_S:
            return
        probe = self._probes.get(router)
        if probe is None:
            timeout_s = min(self._timeout_s, _PROBE_TIMEOUT_S)
            probe = asyncio.create_task(
                self._request("GET", f"{router}/health", timeout_s=timeout_s)
            )
            self._probes[router] = probe
            probe.add_done_callback(partial(self._end_probe, router))
        await asyncio.shield(probe)

    def _end_probe(self, router: str, probe: asyncio.Task[object]) -> None:
        del self._probes[router]
        if not probe.cancelled() and probe.exception() is None:
            self._answered[router] = _now()

    async def _request(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the response and its body.

        Args:
            timeout_s: maximum time until the request is sent, and until its response begins, in
                seconds.
        """
        timeout = aiohttp.ClientTimeout(
            total=None,
            connect=timeout_s,
            sock_connect=min(self._timeout_s, timeout_s),
            sock_read=timeout_s,
        )
        sent = {**_JSON, **(headers or {})}
        session = self._checks if method == "GET" else self._calls
        async with session.request(
            method, url, data=body, headers=sent, timeout=timeout, allow_redirects=False
        ) as response:
            return response, await response.read()


def _open_session(token: str | None, tls: MutualTls | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=RouterConnector(tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )


async def _twice(call: Callable[[], Awaitable[T]]) -> T:
    """Call a router; repeat the call once if the connection was closed before the answer.

    A router that stops closes its idle connections, and may do so while a call is sent on one.
    """
    try:
        return await call()
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        log.debug("router closed a connection", error=repr(error))
        return await call()


def _was_sent(call: "asyncio.Task[object]") -> bool:
    """Return whether a call may have reached its router, which then may have executed it."""
    failure = call.exception() if call.done() and not call.cancelled() else None
    return not isinstance(failure, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def _readiness(model: str, known: Sequence[ModelReadiness]) -> ModelReadiness:
    """Return the entry of a model, or one with the reason that it is not registered."""
    for entry in known:
        if entry.model == model:
            return entry
    others = ", ".join(repr(entry.model) for entry in known[:_MAX_NAMED])
    reason = f"no worker of the model {model!r} is registered" + (others and f", only of {others}")
    return ModelReadiness(model=model, ready=False, reason=reason)


def _refusal(error: Exception) -> str | None:
    """Return why a router refuses calls: OpenSSL's name of a TLS error, or a refused token.

    The result has no address. It is None for any other error.
    """
    if isinstance(error, aiohttp.ClientResponseError) and error.status == HTTPStatus.UNAUTHORIZED:
        return "it refuses the cluster token"
    causes = (getattr(error, "certificate_error", None), error.__cause__, error.__context__)
    return next((cause.reason for cause in causes if isinstance(cause, ssl.SSLError)), None)


def _now() -> float:
    return asyncio.get_running_loop().time()
