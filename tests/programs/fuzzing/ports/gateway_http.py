"""The HTTP port of a gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from tests.programs.fuzzing import documents, http, requests
from tests.programs.fuzzing.ports.base import Port, Wrong
from tests.programs.fuzzing.ports.gateways import check_gateway, gateway
from tests.services.gateway.conftest import Site

CONNECTIONS = 32
RAW_SHARE = 0.2
"""Fraction of the requests that have a mutated head or framing."""
TYPED = {200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 426, 429, 431, 501, 503, 504, 505}
CHAT = {"role": "user", "content": "hi"}
SAMPLING = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "n": 1}
RECORDED: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/completions", {"prompt": "Hello", **SAMPLING, "logprobs": 1, "echo": False}),
    ("POST", "/v1/completions", {"prompt": [[1, 2], [3]], "stream": True, "max_tokens": 2}),
    ("POST", "/v1/chat/completions", {"messages": [CHAT, CHAT], **SAMPLING, "logprobs": True}),
    (
        *("POST", "/v1/chat/completions"),
        {
            "messages": [CHAT],
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "u",
        },
    ),
    ("POST", "/tokenize", {"prompt": "Hello"}),
    ("POST", "/tokenize", {"messages": [CHAT]}),
    ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
    ("POST", "/v1/embeddings", {"input": "x"}),
)


class GatewayHttpPort(Port):
    """A gateway with a fake router and a fake worker."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site
        self._port = int(site.url.rpartition(":")[2])

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator["GatewayHttpPort"]:
        async with gateway(header_timeout_s=0.4, body_timeout_s=0.4) as site:
            yield cls(site)

    async def send(self, rng: Random, count: int) -> None:
        seeds = [rng.random() for _ in range(CONNECTIONS)]
        share = count // CONNECTIONS
        async with asyncio.TaskGroup() as clients:
            for seed in seeds:
                clients.create_task(self._client(Random(seed), share))

    async def _client(self, rng: Random, count: int) -> None:
        connection = http.Connection(self._port)
        for _ in range(count):
            method, path, document = rng.choice(RECORDED)
            if rng.random() < RAW_SHARE:
                valid = requests.request(method, path, json.dumps(document).encode())
                self._check_raw(await http.send_raw(self._port, requests.mutated(valid, rng)))
                continue
            body = documents.mutated(document, rng)
            try:
                status, answer = await connection.exchange(requests.request(method, path, body))
            except TimeoutError as error:
                raise Wrong(f"{method} {path} {body[:300]!r} had no answer") from error
            except (EOFError, OSError):  # on a busy machine, the time limit of the head has passed
                self.outcomes["closed"] += 1
                continue
            self._check_answer(status, answer, body)
        await connection.close()

    def _check_answer(self, status: int, answer: bytes, body: bytes) -> None:
        self.outcomes[str(status)] += 1
        if status not in TYPED:
            raise Wrong(f"{body[:1000]!r} was answered with {status} {answer[:500]!r}")
        if status != 200:
            error = json.loads(answer)["error"]
            assert error["message"]
            assert error["type"]
        elif answer.startswith(b"{"):
            parsed(answer)

    def _check_raw(self, received: bytes) -> None:
        statuses = http.statuses_of(received)
        self.outcomes["raw " + " ".join(map(str, statuses[:2]))] += 1
        if received and not statuses:
            raise Wrong(f"not HTTP: {received[:300]!r}")
        if wrong := set(statuses) - TYPED - {100}:
            raise Wrong(f"a raw request was answered with {wrong}: {received[:500]!r}")

    async def check(self) -> None:
        await check_gateway(self._site)


def parsed(text: str | bytes) -> Any:
    """Return a JSON document.

    Raises:
        Wrong: it is not JSON, or contains NaN or Infinity, which is not JSON either.
    """

    def refuse(name: str) -> None:
        raise Wrong(f"an answer contains {name}")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise Wrong(f"an answer is not JSON: {text[:300]!r}") from error
