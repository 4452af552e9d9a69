"""Requests for embeddings: bodies, answers, and combinations that are refused."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadgen.clock import Clock
from loadgen.config import ArrivalConfig, RunConfig, WorkloadConfig
from loadgen.errors import UsageError
from loadgen.record import Failure, Record
from loadgen.schedule import Limits, ScheduledRequest
from loadgen.target.base import Endpoint, Options
from loadgen.target.choice import open_target
from loadgen.workload.base import RequestSpec

EMBEDDING = base64.b64encode(bytes(8)).decode()


class Server:
    """Answers requests for embeddings, and records their bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answer: dict[str, Any] | None = None

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        data = [{"embedding": EMBEDDING} for _ in self.bodies[-1]["input"]]
        usage = {"prompt_tokens": 7, "total_tokens": 7}
        return web.json_response(self.answer or {"data": data, "usage": usage})


@pytest.fixture
async def served() -> AsyncIterator[tuple[Server, str]]:
    server, app = Server(), web.Application()
    app.router.add_post("/v1/embeddings", server.handle)
    async with TestServer(app) as running:
        yield server, f"http://127.0.0.1:{running.port}/v1"


async def send(url: str, prompt: Any, **options: Any) -> Record:
    target = open_target(url, Options("m", **options), Endpoint.EMBEDDINGS)
    spec = RequestSpec(prompt, 3, 1)
    record = Record(0, 0.0, 3, 1)
    await target.send(ScheduledRequest(spec, 0.0), record, Clock())
    await target.close()
    return record


async def test_each_embedding_counts_as_an_output_token(served: tuple[Server, str]) -> None:
    server, url = served
    record = await send(url, "a b c", texts=2, extra={"dimensions": 4})
    (body,) = server.bodies
    first, second = body.pop("input")
    assert body == {"model": "m", "encoding_format": "base64", "dimensions": 4}
    assert first == "a b c"
    assert sorted(second.split(" ")) == ["a", "b", "c"]
    assert record.succeeded
    assert (record.output_tokens, record.input_tokens) == (2, 7)
    assert record.first == record.last


async def test_texts_are_different_orders_of_the_prompt(served: tuple[Server, str]) -> None:
    server, url = served
    ids = list(range(20))
    assert (await send(url, ids, texts=8)).succeeded
    texts = server.bodies[0]["input"]
    assert [sorted(text) for text in texts] == [ids] * 8
    assert len({tuple(text) for text in texts}) == 8


@pytest.mark.parametrize(
    "answer", [{}, {"data": []}, {"data": [{"embedding": ""}]}, {"data": [{}]}, {"data": 1}]
)
async def test_invalid_answer_is_a_failure(
    served: tuple[Server, str], answer: dict[str, Any]
) -> None:
    server, url = served
    server.answer = answer or {"error": "none"}
    assert (await send(url, "a b")).failure is Failure.MALFORMED


async def test_answers_are_kept_for_a_comparison(served: tuple[Server, str]) -> None:
    assert EMBEDDING in (await send(served[1], "a b", keep_answers=True)).text


def test_target_over_grpc_is_refused() -> None:
    with pytest.raises(UsageError, match="HTTP target"):
        open_target("grpc://127.0.0.1:1", Options("m"), Endpoint.EMBEDDINGS)


def test_texts_need_the_endpoint() -> None:
    with pytest.raises(UsageError, match="--endpoint embeddings"):
        RunConfig("http://x/v1", WorkloadConfig(), ArrivalConfig(), Limits(requests=1), texts=2)
