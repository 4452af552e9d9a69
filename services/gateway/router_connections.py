"""Connections to the routers, which are opened a few at a time."""

import asyncio
from collections import defaultdict

import aiohttp
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from services.common.tls import MutualTls

MAX_OPENING = 64
"""Maximum number of connections to one router that are opened at the same time."""
_KEEP_ALIVE_S = 60.0
"""Time in seconds after which this client closes an idle connection; shorter than the router's."""


class RouterConnector(aiohttp.TCPConnector):
    """Pool of connections. Their number has no limit, because each queued call needs one.

    A burst of calls that opened all of its connections at once could exceed the backlog of the
    router's socket. The event loop could also take longer than the timeout to open them. The
    timeout ``sock_connect`` of a call therefore begins when its connection is opened, and at most
    `MAX_OPENING` are opened at a time. The timeout ``connect`` includes the time before.
    """

    def __init__(self, tls: MutualTls | None) -> None:
        ssl = tls.client_context if tls else True
        super().__init__(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=ssl)
        self._opening: defaultdict[object, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_OPENING)
        )

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Return an idle or a new connection."""
        async with asyncio.timeout(timeout.connect), self._opening[req.url.host, req.url.port]:
            return await super().connect(req, traces, timeout)
