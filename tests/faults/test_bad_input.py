"""Bad requests get typed errors, leak no resources and do not disturb good requests."""

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import httpx
import pytest

from tests.harness.deployment import Running, deployed
from tests.programs.fuzzing import documents, http, requests
from tests.programs.fuzzing.ports.gateway_http import RECORDED, TYPED

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BAD_REQUESTS, DISCONNECTS, GOOD_REQUESTS, CONCURRENCY = 300, 40, 30, 16
MUTATED_REQUESTS, RAW_REQUESTS = 200, 100
MUTATED_S, GOOD_S = 3.0, 240.0  # seconds
KEY = "sk-a-key-of-this-test"


@dataclass(frozen=True)
class Attack:
    """One kind of bad request: its body and headers, and the acceptable status codes."""

    name: str
    body: bytes
    statuses: tuple[int, ...]
    headers: tuple[tuple[str, str], ...] = ()


def _attacks(model: str) -> list[Attack]:
    good = {"model": model, "prompt": "Hello", "max_tokens": 4}

    def body(**changes: object) -> bytes:
        return json.dumps({**good, **changes}).encode()

    deep = b'{"model":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    return [
        Attack("malformed JSON", b'{"model": "x", ', (400,)),
        Attack("not an object", b"[1, 2, 3]", (400,)),
        Attack("deep JSON", deep, (400,)),
        Attack("10 MB prompt", body(prompt="a" * 10_000_000), (413,)),
        Attack("negative max_tokens", body(max_tokens=-1), (400,)),
        Attack("huge max_tokens", body(max_tokens=10**12), (400,)),
        Attack("billion choices", body(n=10**9), (400,)),
        Attack("unknown model", body(model="gpt-17"), (404,)),
        Attack("invalid UTF-8", b'{"model": "\xff\xfe", "prompt": "x"}', (400,)),
        Attack("lone surrogate", b'{"model": "x", "prompt": "\\ud800"}', (400, 404)),
        Attack("prompt longer than the context", body(prompt=[1] * 9000), (400,)),
        Attack("token outside the vocabulary", body(prompt=[10**7]), (400,)),
        Attack("NaN temperature", b'{"model":"m","prompt":"x","temperature":NaN}', (400,)),
        Attack("penalty that overflows every logit", body(repetition_penalty=1e-300), (400,)),
        Attack("list of many invalid items", b'{"prompt":[' + b"{}," * 300_000 + b"{}]}", (400,)),
        Attack("headers above the limit", body(), (431,), (("x-long", "a" * 100_000),)),
        Attack("unknown field", body(best_tool="hammer"), (400,)),
        Attack("prompt of objects", body(prompt=[{"a": 1}]), (400,)),
        Attack("wrong key", body(), (401,), (("authorization", "Bearer sk-wrong"),)),
    ]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(hashlib.sha256(KEY.encode()).hexdigest() + "\n")
    environment = {
        "HEADRACE_GATEWAY_API_KEYS_FILE": str(keys),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # a larger one grows with each number of rows
    }
    with deployed(environment=environment, api_key=KEY) as deployment:
        yield deployment


async def test_bad_requests_do_not_disturb_good_ones(running: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    rng = random.Random(11)
    attacks = _attacks(running.model)
    async with httpx.AsyncClient(
        base_url=running.url, headers=headers, trust_env=False, timeout=120
    ) as client:
        expected = await _good(client, running.model)
        await asyncio.to_thread(running.wait_until_idle)
        pages, memory = running.pages_free(), running.memory()
        limit = asyncio.Semaphore(CONCURRENCY)

        async def limited(call: Callable[[], Awaitable[None]]) -> None:
            async with limit:
                await call()

        calls: list[Callable[[], Awaitable[None]]] = [
            partial(_attack, client, rng.choice(attacks)) for _ in range(BAD_REQUESTS - DISCONNECTS)
        ]
        calls += [
            partial(_disconnect, client, running.model, rng.uniform(0, 0.6))
            for _ in range(DISCONNECTS)
        ]
        calls += [partial(_mutated, client, rng.random()) for _ in range(MUTATED_REQUESTS)]
        calls += [partial(_raw, running.port, rng.random()) for _ in range(RAW_REQUESTS)]
        calls += [partial(_check_good, client, running.model, expected)] * GOOD_REQUESTS
        rng.shuffle(calls)
        await asyncio.gather(*(limited(call) for call in calls))
        await asyncio.to_thread(running.wait_until_idle)
    assert running.pages_free() == pages
    assert running.metric("prefill-0", "headrace_kv_lease_active") == 0
    for name, after in running.memory().items():
        assert after < memory[name] * 1.1 + 64 * 2**20, f"{name}: {memory[name]} -> {after} bytes"


async def _good(client: httpx.AsyncClient, model: str) -> str:
    """Return the text of a completion. A 429 is repeated after its `Retry-After`, as clients do."""
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    async with asyncio.timeout(GOOD_S):
        while True:
            response = await client.post("/v1/completions", json=body)
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                response.raise_for_status()
                return str(response.json()["choices"][0]["text"])
            await asyncio.sleep(int(response.headers["retry-after"]))


async def _check_good(client: httpx.AsyncClient, model: str, expected: str) -> None:
    assert await _good(client, model) == expected


async def _attack(client: httpx.AsyncClient, attack: Attack) -> None:
    headers = {"content-type": "application/json", **dict(attack.headers)}
    response = await client.post("/v1/completions", content=attack.body, headers=headers)
    assert response.status_code in attack.statuses, f"{attack.name}: {response.text[:300]}"
    error = response.json()["error"]
    assert error["message"], attack.name
    assert error["type"], attack.name
    assert response.headers["x-request-id"]


async def _mutated(client: httpx.AsyncClient, seed: float) -> None:
    """Send a request with mutated JSON. One that is still valid may take long, and is cancelled."""
    rng = random.Random(seed)
    method, path, document = rng.choice(RECORDED)
    body = documents.mutated(document, rng)
    headers = {"content-type": "application/json"}
    with suppress(TimeoutError):
        async with asyncio.timeout(MUTATED_S):
            response = await client.request(method, path, content=body, headers=headers)
        assert response.status_code in TYPED, f"{path}: {response.text[:300]}"


async def _raw(port: int, seed: float) -> None:
    """Send a request with a mutated head or framing."""
    rng = random.Random(seed)
    method, path, document = rng.choice(RECORDED)
    headers = (f"Authorization: Bearer {KEY}".encode(),)
    valid = requests.request(method, path, json.dumps(document).encode(), headers)
    received = await http.send_raw(port, requests.mutated(valid, rng))
    assert set(http.statuses_of(received)) <= TYPED | {100}, received[:300]


async def _disconnect(client: httpx.AsyncClient, model: str, after_s: float) -> None:
    """Send a request and disconnect before, during or after the prefill."""
    body = {
        "model": model,
        "prompt": "Tell me a long story about the sea. " * 20,
        "max_tokens": 200,
        "stream": True,
    }

    async def read() -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                pass

    try:
        async with asyncio.timeout(after_s):
            await read()
    except TimeoutError:
        return
