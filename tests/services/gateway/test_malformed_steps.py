"""Malformed steps of a worker fail its streams, which continue elsewhere, and nothing else."""

import gc
import math
from typing import Any

import pytest

from headrace.v1 import decode_pb2
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import STOP, FakeStream, say, until

BODY = {"prompt": "x", "max_tokens": 4, "temperature": 0, "logprobs": 1}


def _step(stream: FakeStream, **token: Any) -> decode_pb2.DecodeStep:
    delta = decode_pb2.StreamDelta(stream=stream.start.stream)
    delta.tokens.add(**{"token": 5, "logprob": -0.5, **token})
    return decode_pb2.DecodeStep(deltas=[delta])


async def test_step_that_cannot_be_decoded_ends_the_session(
    open_site: OpenSite, unhandled: list[dict[str, Any]]
) -> None:
    site: Site = await open_site(workers=2)
    ids = site.encode(" Paris")

    async def malformed(stream: FakeStream) -> None:
        await stream.send_bytes(b"\xff\xff")

    site.workers[0].script = malformed
    site.workers[1].script = say(*ids)
    answer = await site.http.post("/v1/completions", json=BODY)
    assert answer.json()["choices"][0]["text"] == " Paris"
    await site.router.settled()
    gc.collect()
    assert not unhandled


@pytest.mark.parametrize(
    "token",
    [
        {"token": 2**32 - 1},
        {"logprob": math.nan},
        {"logprob": -math.inf},
        {"top": [{"token": 2**32 - 1, "logprob": -1.0}]},
        {"top": [{"token": 5, "logprob": math.nan}]},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_token_is_not_delivered(
    open_site: OpenSite, token: dict[str, Any], stream: bool
) -> None:
    site: Site = await open_site(workers=2)
    ids = site.encode(" Paris")

    async def malformed(stream: FakeStream) -> None:
        step = _step(stream, **token)
        step.deltas[0].ended.add(choice=0, reason=STOP)
        await stream.send_bytes(step.SerializeToString())

    site.workers[0].script = malformed
    site.workers[1].script = say(*ids)
    answer = await site.http.post("/v1/completions", json={**BODY, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert " Paris" in answer.text
    assert "error" not in answer.text
    await site.router.settled()
    assert [release.blame for release in site.router.releases] == ["decode-0", None]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
async def test_implausible_stage_times_are_not_recorded(site: Site, seconds: float) -> None:
    async def implausible(stream: FakeStream) -> None:
        await stream.tokens(5)
        await stream.end(queue=seconds, prefill=0.5)

    site.worker.script = implausible
    assert (await site.http.post("/v1/completions", json=BODY)).status_code == 200
    name = "headrace_request_stage_seconds_sum"
    await until(lambda: site.metric(name, stage="prefill") == 0.5)
    assert site.metric(name, stage="queue") == 0
