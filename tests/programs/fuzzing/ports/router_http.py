"""The HTTP port of a router, with the token of the cluster and without it."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from services.common.http_server import HttpServer, listen
from services.common.placement import Role
from services.router.app import build_dispatcher, create_app
from services.router.server import http_config
from services.router.settings import RouterSettings
from tests.programs.fuzzing import documents, http, requests
from tests.programs.fuzzing.http import statuses_of
from tests.programs.fuzzing.ports.base import Port, Wrong
from tests.services.router.samples import beat, place_request, registration

TOKEN = "token-of-the-cluster"
CONNECTIONS = 16
RAW_SHARE = 0.2
"""Fraction of the requests that have a mutated head or framing."""
TYPED = {200, 400, 401, 403, 404, 405, 408, 409, 413, 414, 415, 426, 429, 431, 501, 503, 505}
_AUTHORIZED = (b"Authorization: Bearer " + TOKEN.encode(),)


def _recorded(worker: str) -> list[tuple[str, Any]]:
    """Return the path and the body of valid calls, of another worker than the ordinary ones."""
    identity = {"worker_id": worker, "epoch": "e1"}
    return [
        (
            "/v1/register",
            registration(worker, Role.COLOCATED, model="other").model_dump(mode="json"),
        ),
        ("/v1/heartbeat", beat(worker, admitted=["p-1"]).model_dump(mode="json")),
        ("/v1/deregister", identity),
        (
            "/v1/place",
            place_request(model="other", tenant="a", exclude=[worker]).model_dump(mode="json"),
        ),
        ("/v1/release", {"placement_id": "p-1", "outcome": "failed", "blame": worker}),
        ("/v1/workers", None),
        ("/v1/readiness", None),
    ]


class RouterHttpPort(Port):
    """A router with one ordinary pair of workers."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._client = http.Connection(port)

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator["RouterHttpPort"]:
        settings = RouterSettings.model_validate(
            {"cluster_token": TOKEN, "suspect_after_s": 600, "gone_after_s": 3600}
        )
        listener = listen("127.0.0.1", 0)
        dispatcher = build_dispatcher(settings, now=-math.inf)  # not one that waits for workers
        server = HttpServer(http_config(create_app(settings, dispatcher)))
        serving = asyncio.create_task(server.serve([listener]))
        router = cls(listener.getsockname()[1])
        await router.register()
        yield router
        await router._client.close()
        server.should_exit = True
        await serving

    async def register(self) -> None:
        """Register the ordinary workers, which mutated messages may have evicted."""
        for name, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)):
            await self._call("/v1/register", registration(name, role).model_dump(mode="json"))
            await self._call("/v1/heartbeat", beat(name).model_dump(mode="json"))

    async def send(self, rng: Random, count: int) -> None:
        seeds = [rng.random() for _ in range(CONNECTIONS)]
        async with asyncio.TaskGroup() as clients:
            for seed in seeds:
                clients.create_task(self._attack(Random(seed), count // CONNECTIONS))

    async def _attack(self, rng: Random, count: int) -> None:
        connection = http.Connection(self._port)
        for _ in range(count):
            path, document = rng.choice(_recorded(f"other-{rng.randrange(4)}"))
            method = "GET" if document is None else "POST"
            body = b"" if document is None else documents.mutated(document, rng)
            forged = rng.random() < 0.1
            headers = (b"Authorization: Bearer forged",) if forged else _AUTHORIZED
            data = requests.request(method, path, body, headers)
            if rng.random() < RAW_SHARE:
                statuses = statuses_of(await http.send_raw(self._port, requests.mutated(data, rng)))
                self.outcomes["raw " + " ".join(map(str, statuses[:2]))] += 1
                if wrong := set(statuses) - TYPED - {100}:
                    raise Wrong(f"a raw request was answered with {wrong}: {data[:500]!r}")
                continue
            try:
                status, answer = await connection.exchange(data)
            except (EOFError, OSError):
                self.outcomes["closed"] += 1
                continue
            self.outcomes[str(status)] += 1
            if status not in ({401} if forged else TYPED):
                raise Wrong(f"{path} {body[:500]!r} was answered with {status} {answer[:300]!r}")
        await connection.close()

    async def check(self) -> None:
        await self.register()
        placed = await self._call("/v1/place", place_request(model="small").model_dump(mode="json"))
        pair = placed["prefill"]["worker_id"], placed["decode"]["worker_id"]
        assert pair == ("prefill-0", "decode-0")
        release = {"placement_id": placed["placement_id"], "outcome": "ok"}
        await self._call("/v1/release", release)

    async def _call(self, path: str, document: Any) -> Any:
        body = json.dumps(document).encode()
        status, answer = await self._client.exchange(
            requests.request("POST", path, body, _AUTHORIZED)
        )
        assert status == 200, answer
        return json.loads(answer)
