"""Choices of a request: a stopped one is cancelled on the worker; each has metrics of its own."""

import asyncio
import json
from typing import Any

import pytest

from headrace.v1 import error_pb2, inference_pb2, inference_pb2_grpc
from services.common.token_ids import pack_tokens
from services.common.tracing import NO_SPAN
from services.gateway import timeline
from services.gateway.metrics import GatewayMetrics
from services.gateway.requests import GenerationOptions, GenerationRequest, RequestContext
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import PROMPT, completion, failing
from tests.services.gateway.fakes import LENGTH, STOP, FakeStream, Script, say, until

TOKENS = "headrace_generation_tokens_total"


def stopping(site: Site) -> Script:
    """Return a script whose second choice reaches the stop string "stop" before the others end."""
    running, stops = site.encode(" one two three four"), site.encode(" go stop and on")

    async def script(stream: FakeStream) -> None:
        await stream.tokens(*running[:2], choice=0)
        await stream.tokens(*stops, choice=1)  # tokens after the stop string were in flight
        await until(lambda: stream.cancelled_choices == [1])
        await stream.tokens(*running[2:], choice=0)
        await stream.end(LENGTH, choice=0)

    return script


async def test_choice_that_reaches_a_stop_string_is_cancelled_on_the_worker(site: Site) -> None:
    site.worker.script = stopping(site)
    answer = (await completion(site, n=2, stop="stop")).json()
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (" one two three four", "length"),
        (" go ", "stop"),
    ]
    await site.router.settled()
    assert not site.worker.streams[0].cancelled.is_set(), "no choice was left to cancel"


async def test_choice_that_the_worker_has_ended_is_not_cancelled(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        await stream.tokens(*site.encode(" go"), choice=1)
        await stream.end(STOP, choice=1)
        await stream.tokens(*site.encode(" on"), choice=0)
        await stream.end(STOP, choice=0)

    site.worker.script = script
    assert (await completion(site, n=2, stop="x")).status_code == 200
    assert site.worker.streams[0].cancelled_choices == []


async def test_last_choice_that_reaches_a_stop_string_cancels_the_stream(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        await stream.tokens(*site.encode(" stop"), choice=0)
        await until(lambda: stream.cancelled_choices == [0])
        await stream.tokens(*site.encode(" stop"), choice=1)
        await stream.cancelled.wait()

    site.worker.script = script
    assert (await completion(site, n=2, stop="stop")).status_code == 200
    await asyncio.wait_for(site.worker.streams[0].cancelled.wait(), 30)
    assert site.worker.streams[0].cancelled_choices == [0]


async def usage_of_stream(site: Site, **changes: Any) -> int:
    body = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}, **changes}
    response = await site.http.post("/v1/completions", json=body)
    events = [line[6:] for line in response.text.splitlines() if line]
    tokens: int = json.loads(events[-2])["usage"]["completion_tokens"]
    return tokens


async def test_generation_tokens_equal_the_usage_of_choices_cut_at_a_stop_string(
    site: Site,
) -> None:
    site.worker.script = stopping(site)
    answer = (await completion(site, n=2, stop="stop")).json()
    used = answer["usage"]["completion_tokens"]
    assert used == len(site.encode(" one two three four")) + len(site.encode(" go stop"))
    assert site.metric(TOKENS) == used
    used += await usage_of_stream(site, n=2, stop="stop")
    assert site.metric(TOKENS) == used
    assert site.gateway.recent.of(None).ended[0].output_tokens == used // 2


async def test_generation_tokens_equal_the_usage_over_grpc(site: Site) -> None:
    site.worker.script = say(*site.encode(" go stop and on"))
    request = inference_pb2.GenerateRequest(text="x", stop=["stop"])
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    responses = [response async for response in stub.Generate(request)]
    assert site.metric(TOKENS) == responses[-1].usage.completion_tokens > 0


async def test_generation_tokens_of_a_replayed_request_are_counted_once(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(workers=2)
    ids = site.encode("one two three four")
    site.workers[0].script = failing(error_pb2.ERROR_CODE_INTERNAL, *ids[:2])
    site.workers[1].script = say(*ids)
    answer = (await completion(site)).json()
    assert site.metric(TOKENS) == answer["usage"]["completion_tokens"] == len(ids)


async def test_generation_tokens_include_what_a_cancelled_request_received(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        await stream.tokens(*site.encode(" one two")[:2])
        await stream.cancelled.wait()

    site.worker.script = script
    body = {**PROMPT, "stream": True}
    async with site.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_bytes())
    await site.router.settled()
    assert site.metric(TOKENS) == 2


@pytest.mark.parametrize("choices", [1, 4])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_inter_token_latency_is_that_of_each_choice(
    choices: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each choice gets ``batch`` tokens at once, every 40 ms for each of them."""
    clock = [100.0]
    monkeypatch.setattr(timeline, "_now", lambda: clock[0])
    metrics = GatewayMetrics()
    context = RequestContext("r", None, 100.0, 700.0)
    request = GenerationRequest(context, pack_tokens((1, 2)), 64, 0, GenerationOptions(n=choices))
    line = timeline.RequestTimeline(request, 1, metrics, NO_SPAN)
    line.route()
    line.record_tokens(dict.fromkeys(range(choices), 1))
    for _ in range(10):
        clock[0] += 0.040 * batch
        line.record_tokens(dict.fromkeys(range(choices), batch))
    value = metrics.registry.get_sample_value
    count = value("headrace_inter_token_latency_seconds_count")
    assert count == choices * 10 * batch
    assert value("headrace_inter_token_latency_seconds_sum") == pytest.approx(0.040 * count)
    assert value("headrace_time_to_first_token_seconds_count") == 1
    assert line.output_tokens == value(TOKENS) == count + choices
