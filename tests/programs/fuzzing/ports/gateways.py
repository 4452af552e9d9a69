"""A gateway with a fake router and a fake worker, which answers every choice in the same words."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.gateway.keys import ApiKeys
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from tests.services.gateway.conftest import Site, gateway_site
from tests.services.gateway.fakes import LENGTH, STOP, FakeStream, Script, until

TEXT = " Paris 😀"


def say_to_all(words: list[int]) -> Script:
    """Return a script that sends the same token ids for every choice."""

    async def script(stream: FakeStream) -> None:
        request = stream.start.request
        left = words[stream.replayed : request.max_tokens]
        for choice in range(request.choices):
            await stream.tokens(*left, choice=choice)
            await stream.end(LENGTH if len(left) < len(words) else STOP, choice=choice)

    return script


@asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[Site]:
    """Run a gateway whose ordinary answer is `TEXT`."""
    model = ServedModel.load(GatewaySettings.model_validate({"model": "smollm2-135m"}))
    async with gateway_site(model, 1, ApiKeys(), {"deadline_s": 10.0, **settings}) as site:
        site.worker.script = say_to_all(site.encode(TEXT))
        yield site


async def check_gateway(site: Site) -> None:
    """Check an ordinary answer, and that no request or stream is left.

    Raises:
        AssertionError, TimeoutError: if not.
    """
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = await site.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == TEXT
    await until(lambda: site.metric("headrace_gateway_requests_running") == 0)
    site.worker.streams.clear()  # the fakes record everything
    site.worker.metadata.clear()
    site.router.headers.clear()
    site.router.places.clear()
    site.router.releases.clear()
    site.router.placed.clear()
