"""Random bodies for the encoder end in an answer or in a typed error, and leave nothing behind."""

import json
from random import Random
from typing import Any

import pytest

from tests.services.gateway.encoding.conftest import EncoderSite

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {
        "input": ["abc", "d"],
        "encoding_format": "float",
        "dimensions": 4,
        "truncate_prompt_tokens": 8,
        "prompt_name": "query",
        "priority": 1,
        "user": "u",
    },
    "/v1/rerank": {
        "query": "a",
        "documents": ["b", {"text": "c"}],
        "top_n": 1,
        "return_documents": True,
    },
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": -1},
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 1.5, -0.0, 1e300, "", "a", "\u0000", "a " * 200),
    *([], [[]], [[[]]], {}, {"text": 1}, {"text": "a"}, ["a", 1], [1, "a"], [1, [2]], [[1], "a"]),
    *([2, 3], [[2, 3], [97]], [2**70], [None], [True], [1.0], ["a"] * 3000, [[2]] * 3),
)


def mutated(rng: Random, body: dict[str, Any]) -> bytes:
    """Return a body with some fields replaced, removed or added, or with damaged bytes."""
    changed = dict(body)
    for _ in range(rng.randint(1, 3)):
        match rng.randrange(4):
            case 0 if changed:
                del changed[rng.choice(list(changed))]
            case 1:
                changed[rng.choice(["unknown", "model", "data_1", "messages"])] = rng.choice(VALUES)
            case _ if changed:
                changed[rng.choice(list(changed))] = rng.choice(VALUES)
    raw = bytearray(json.dumps(changed).encode())
    if rng.random() < 0.2:
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


@pytest.mark.few(1)
@pytest.mark.parametrize("path", BODIES)
async def test_fuzzed_body_gets_an_answer_or_a_typed_error(site: EncoderSite, path: str) -> None:
    rng = Random(path)
    statuses = set()
    for _ in range(150):
        raw = mutated(rng, BODIES[path])
        answer = await site.http.post(path, content=raw)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (raw[:300], answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"], raw[:300]
            assert error["type"] == "invalid_request_error"
            assert error["code"], raw[:300]
    assert {200, 400} <= statuses
    assert site.workers[0].worker.idle
    assert not site.gateway.running
