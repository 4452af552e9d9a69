"""A running app of the router without a socket, for the tests of its HTTP API."""

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from quart import Quart
from quart.typing import TestClientProtocol as ClientProtocol

from services.common.placement import Role
from services.common.router_errors import ErrorCode, RouterError
from services.router.dispatcher import Dispatcher
from tests.services.router.samples import beat, registration

TOKEN = "a-cluster-token"
JSON = {"Content-Type": "application/json"}
HEADERS = {"Authorization": f"Bearer {TOKEN}", **JSON}


class Router:
    """A running app of the router, with an HTTP client, the dispatcher and the clock."""

    def __init__(self, app: Quart, dispatcher: Dispatcher, clock: "Clock") -> None:
        self.app = app
        self.dispatcher = dispatcher
        self.clock = clock
        self.client: ClientProtocol = app.test_client()

    async def post(
        self, path: str, body: BaseModel | str | bytes, headers: dict[str, str] = HEADERS
    ) -> tuple[int, Any, Any]:
        data = body.model_dump_json() if isinstance(body, BaseModel) else body
        response = await self.client.post(path, data=data, headers=headers)
        return response.status_code, await response.get_json(), response.headers

    async def join(self, name: str, role: Role, **load: Any) -> None:
        for path, body in (
            ("register", registration(name, role)),
            ("heartbeat", beat(name, **load)),
        ):
            assert (await self.post(f"/v1/{path}", body))[0] == 200

    async def until_waiting(self, count: int) -> None:
        await until(lambda: len(self.dispatcher.queue) == count)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.001)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def code_of(body: Any) -> ErrorCode:
    return RouterError.model_validate(body).error.code
