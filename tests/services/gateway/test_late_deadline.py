"""The deadline of a request passes at the moment at which its response ends."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest
import structlog

from services.common.errors import DeadlineExceeded, Unavailable
from services.gateway.http import responses
from services.gateway.http.middleware import cancel_on_disconnect
from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import say


@pytest.mark.parametrize("stream", [False, True])
async def test_complete_response_has_no_error_appended(
    site: Site, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def late(_: object, work: Coroutine[Any, Any, None]) -> None:
        await work
        raise DeadlineExceeded("the deadline passed")

    monkeypatch.setattr(responses, "cancel_on_disconnect", late)
    site.worker.script = say(*site.encode(" Paris"))
    with structlog.testing.capture_logs() as logs:
        body = {"prompt": "x", "stream": stream}
        answer = await site.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert " Paris" in answer.text
    assert "error" not in answer.text
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == []


async def test_failure_at_the_moment_of_a_cancellation_is_retrieved() -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def fail() -> None:
        raise Unavailable("no worker")

    waiting = asyncio.create_task(cancel_on_disconnect(receive, fail()))
    for _ in range(2):  # the work has failed, and `waiting` has not noticed yet
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    del waiting
    gc.collect()
    assert not unhandled
