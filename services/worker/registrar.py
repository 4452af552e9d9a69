"""Registration of a worker of any role with every router, and its heartbeats."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import httpx
import structlog

from services.common.messages import MAX_ADMITTED
from services.common.placement import WorkerState
from services.common.tls import MutualTls

log = structlog.get_logger()

_CANCEL_AGAIN_S = 0.1
"""Time after which tasks that still run are cancelled again, seconds."""
_MAX_REASON = 300
"""Maximum characters of the answer of a router in logs."""


L = TypeVar("L")
"""Load of a worker, as its kind measures it."""


class Registered(Protocol):
    """Fields that all registrations have."""

    @property
    def worker_id(self) -> str: ...
    @property
    def epoch(self) -> str: ...
    @property
    def heartbeat_s(self) -> float: ...


@dataclass(frozen=True)
class Report:
    """Values that all heartbeats report, as the fields of `Heartbeat` with these names."""

    state: WorkerState
    reason: str | None
    admitted: list[str]
    computed_here: list[str]
    postponed: list[str]
    ended: list[str]


class _Unreported:
    """Placements that the next heartbeat to each router reports, until it is answered.

    A heartbeat has space for `MAX_ADMITTED` of them: older ones are dropped, and the router lets
    them expire.
    """

    def __init__(self, urls: list[str]) -> None:
        self._ids: dict[str, deque[str]] = {url: deque(maxlen=MAX_ADMITTED) for url in urls}

    def add(self, placement_id: str) -> None:
        for ids in self._ids.values():
            ids.append(placement_id)

    def to(self, url: str) -> list[str]:
        return list(self._ids[url])

    def remove(self, url: str, reported: list[str]) -> None:
        """Remove the placements that a router has received; some may have been dropped since."""
        received, left = set(reported), self._ids[url]
        while left and left[0] in received:
            left.popleft()


class BaseRegistrar(ABC, Generic[L]):
    """Keeps one worker registered with all routers, and reports its load with every heartbeat.

    A restarted router requests a new registration in its answer to a heartbeat.

    Args:
        path: beginning of the paths of the calls.

    Attributes:
        state: state that heartbeats report.
        not_ready: why a started worker is not ready, or None; heartbeats then report `NOT_READY`.
    """

    def __init__(
        self,
        registration: Registered,
        routers: list[str],
        *,
        path: str = "/v1",
        token: str | None,
        tls: MutualTls | None = None,
    ) -> None:
        self._registration = registration
        self._routers = routers
        self._path = path
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(2.0),
            trust_env=False,
            verify=tls.client_context if tls else True,
        )
        self._admitted: dict[str, deque[tuple[int, str]]] = {
            url: deque(maxlen=MAX_ADMITTED) for url in routers
        }
        """Placements that no heartbeat has reported, by URL. A heartbeat has space for all of them:
        older ones are dropped, and the router lets them expire."""
        self._computed_here = _Unreported(routers)
        self._postponed = _Unreported(routers)
        self._ended = _Unreported(routers)
        # Heartbeats to a router are sent one at a time, in order.
        self._beats = {url: asyncio.Lock() for url in routers}
        self._tasks: list[asyncio.Task[None]] = []
        self._failures = {url: f"{url}: not contacted yet" for url in routers}
        """Error of the last call to each router that does not know this worker, by URL."""
        self._unmatched: dict[str, str | None] = {}
        """Reason of each router for the state ``unmatched``, by URL; None for another state."""
        self.state: WorkerState = WorkerState.STARTING
        self.not_ready: str | None = None

    @property
    @abstractmethod
    def submitted(self) -> int:
        """Number of commands submitted since the start."""

    @abstractmethod
    def _load(self) -> tuple[int, L]:
        """Return the number of commands that the current load includes, and the load."""

    @abstractmethod
    def _introduction(self) -> dict[str, Any]:
        """Return the body of the registration."""

    @abstractmethod
    def _heartbeat(self, report: Report, load: L) -> dict[str, Any]:
        """Return the body of a heartbeat."""

    @property
    def unregistered(self) -> str | None:
        """Reason for which no router knows this worker; None if one does or none is configured."""
        if len(self._failures) < max(1, len(self._routers)):
            return None
        return f"not registered: {', '.join(self._failures.values())}"

    @property
    def unmatched(self) -> str | None:
        """Reason for which no other worker can serve requests with this one; None if one can.

        A router that has just started may not know all workers yet, so one router that has found
        another worker suffices.
        """
        reasons = [self._unmatched[url] for url in self._unmatched if url not in self._failures]
        return reasons[0] if reasons and all(reasons) else None

    def admit(self, placement_id: str) -> None:
        """Report a placement with the first heartbeat whose load includes it.

        Call this after submitting the placement's command.
        """
        for pending in self._admitted.values():
            pending.append((self.submitted, placement_id))

    def computed_here(self, placement_id: str) -> None:
        """Report with the next heartbeat that this worker computes the prompt of a placement."""
        self._computed_here.add(placement_id)

    def postpone(self, placement_id: str) -> None:
        """Report with the next heartbeat that the prefill worker of a placement is asked later."""
        self._postponed.add(placement_id)

    def end(self, placement_id: str) -> None:
        """Report with the next heartbeat that a placement has ended on this worker."""
        self._ended.add(placement_id)

    def start(self) -> None:
        """Start registering and sending heartbeats."""
        self.state = WorkerState.READY
        self._tasks = [asyncio.create_task(self._keep_known(url)) for url in self._routers]

    async def drain(self) -> None:
        """Report to every router that this worker accepts nothing new."""
        self.state = WorkerState.DRAINING
        await asyncio.gather(*(self._beat(url) for url in self._routers), return_exceptions=True)

    async def stop(self) -> None:
        """Stop the heartbeats and deregister from every router."""
        left = {*self._tasks}
        while left:  # versions of anyio that httpx may use lose a cancellation during a connect
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
        body = {"worker_id": self._registration.worker_id, "epoch": self._registration.epoch}
        leave = (
            self._http.post(f"{url}{self._path}/deregister", json=body) for url in self._routers
        )
        await asyncio.gather(*leave, return_exceptions=True)
        await self._http.aclose()

    async def _keep_known(self, url: str) -> None:
        known = complained = False
        while True:
            try:
                if not known:
                    await self._register(url)
                    log.info("registered", router=url)
                known, complained = await self._beat(url), False
                self._failures.pop(url, None)
            # An OSError is a TLS alert of the router, which httpx passes on as it is.
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                if not complained:
                    log.warning("not registered", router=url, error=_reason(error))
                known, complained = False, True
                self._failures[url] = f"{url}: {_reason(error)}"
            await asyncio.sleep(self._registration.heartbeat_s)

    async def _register(self, url: str) -> None:
        response = await self._http.post(f"{url}{self._path}/register", json=self._introduction())
        response.raise_for_status()

    async def _beat(self, url: str) -> bool:
        """Send one heartbeat; return False if the router asks for a registration."""
        async with self._beats[url]:
            return await self._send(url)

    async def _send(self, url: str) -> bool:
        pending = self._admitted[url]
        taken, fields = self._load()
        computed_here, postponed = self._computed_here.to(url), self._postponed.to(url)
        ended = self._ended.to(url)
        admitted = [placement for number, placement in pending if number <= taken]
        is_blocked = self.state is WorkerState.READY and self.not_ready is not None
        state = WorkerState.NOT_READY if is_blocked else self.state
        report = Report(state, self.not_ready, admitted, computed_here, postponed, ended)
        beat = self._heartbeat(report, fields)
        response = await self._http.post(f"{url}{self._path}/heartbeat", json=beat)
        response.raise_for_status()
        while pending and pending[0][0] <= taken:  # some may have been dropped since
            pending.popleft()
        self._computed_here.remove(url, computed_here)
        self._postponed.remove(url, postponed)
        self._ended.remove(url, ended)
        reply = response.json()  # a newer router may send further fields
        self._unmatched[url] = reply.get("unmatched")
        return not reply.get("register_again", False)


def _reason(error: Exception) -> str:
    """Return why a call to a router failed: the message of its answer, if it answered."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP status {error.response.status_code}: {error.response.text[:_MAX_REASON]}"
    return repr(error)
