"""The deadline of a request passes at the moment at which its response ends."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import structlog

from services.common.errors import DeadlineExceeded
from services.gateway.http import responses
from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import say


@pytest.mark.parametrize("stream", [False, True])
async def test_complete_response_has_no_error_appended(
    site: Site, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    @asynccontextmanager
    async def late(_: object) -> AsyncGenerator[None]:
        yield
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
