"""``usage.prompt_tokens_details.cached_tokens`` of a real deployment, and tenants kept apart."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from runtime.pages.plan import PAGE_SIZE
from services.gateway.keys import Tenant
from tests.harness.deployment import Running, deployed
from tests.harness.random_model import RandomModel

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

KEYS = {"key-a": "a", "another-key-a": "a", "key-b": "b"}
ANSWER = 6


@pytest.fixture(scope="module", params=["1+1", "colocated"])
def running(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    lines = (f"{hashlib.sha256(key.encode()).hexdigest()} {name}" for key, name in KEYS.items())
    keys.write_text("\n".join(lines))
    flags = ["--model", str(RandomModel("tiny").ensure())]
    if request.param == "colocated":
        flags.append("--colocated")
    environment = {"HEADRACE_GATEWAY_API_KEYS_FILE": str(keys)}
    with deployed(*flags, environment=environment, api_key="key-a") as found:
        found.wait_for_all_workers()
        yield found


class Asked:
    """Answer to a request."""

    def __init__(self, running: Running, prompt: Sequence[int], key: str, **fields: Any) -> None:
        body = {"model": running.model, "prompt": list(prompt), "max_tokens": ANSWER}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        url, headers = f"{running.url}/v1/completions", {"authorization": f"Bearer {key}"}
        answer = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == httpx.codes.OK, answer.text
        self.tokens: dict[int, list[int]] = {}
        last = answer.json() if not fields.get("stream") else self._read(answer.text)
        for choice in last["choices"]:
            self.tokens[choice["index"]] = choice["token_ids"]
        self.usage = last["usage"]
        assert self.usage["prompt_tokens"] == len(prompt)
        self.cached = self.usage["prompt_tokens_details"]["cached_tokens"]

    def _read(self, text: str) -> dict[str, Any]:
        """Return the last event of a stream, and take the tokens of the others."""
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        for event in events[:-1]:
            for choice in event["choices"]:
                self.tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
        last: dict[str, Any] = events[-1]
        return last


def prompt_of(length: int, seed: int) -> list[int]:
    return [1000 + (7919 * seed + 31 * index * index) % 30_000 for index in range(length)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [1, 4])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 160, 161, 700])
def test_cached_tokens_of_equal_prompts(
    running: Running, length: int, choices: int, stream: bool
) -> None:
    """At least one token is computed again, and no page is shared that is not full."""
    prompt = prompt_of(length, 100 * choices + 10 * stream + length)
    fields: dict[str, Any] = {"n": choices}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    cold, warm, again = [Asked(running, prompt, "key-a", **fields) for _ in range(3)]
    assert cold.cached == 0
    assert warm.cached == again.cached == (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert cold.tokens == warm.tokens == again.tokens
    assert {len(tokens) for tokens in cold.tokens.values()} == {ANSWER}
    assert len(cold.tokens) == choices


def test_tenants_share_nothing(running: Running) -> None:
    """Whatever salt a client sends, also the id of another tenant or what its salt is made of."""
    prompt, full = prompt_of(200, 5), 192
    first = Asked(running, prompt, "key-a")
    assert first.cached == 0
    ids = [Tenant("a").id, Tenant("b").id, json.dumps([Tenant("a").id, None]), "a", "key-a"]
    salts = [None, *ids, hashlib.sha256(json.dumps([Tenant("a").id, None]).encode()).hexdigest()]
    for salt in salts:
        other = Asked(running, prompt, "key-b", **({"cache_salt": salt} if salt else {}))
        assert other.cached == 0, f"tenant b shares with another request by salt {salt!r}"
        assert other.tokens == first.tokens
    for salt in salts:
        again = Asked(running, prompt, "key-b", **({"cache_salt": salt} if salt else {}))
        assert again.cached == full
    assert Asked(running, prompt, "another-key-a").cached == full
    assert Asked(running, prompt, "key-a", cache_salt="x").cached == 0
