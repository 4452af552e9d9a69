"""Requests and worker scripts that tests of failures share."""

from typing import Any

import httpx

from tests.services.gateway.conftest import Site
from tests.services.gateway.fakes import FakeStream, Script

PROMPT = {"prompt": [10, 11, 12], "max_tokens": 20}


def failing(code: int, *first: int, blame: str = "") -> Script:
    """Return a script that sends the tokens ``first``, then an error with ``code``."""

    async def script(stream: FakeStream) -> None:
        if first:
            await stream.tokens(*first)
        await stream.fail(code, worker_id=blame)

    return script


def outcomes(site: Site) -> list[tuple[str, str | None]]:
    """Return the outcome and the blamed worker of every release; each placement has one."""
    assert len({r.placement_id for r in site.router.releases}) == len(site.router.releases)
    return [(r.outcome.value, r.blame) for r in site.router.releases]


async def completion(site: Site, **changes: Any) -> httpx.Response:
    """Send a completion request."""
    return await site.http.post("/v1/completions", json={**PROMPT, **changes})
