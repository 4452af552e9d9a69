"""Spans of the gateway, and the trace context that it receives and sends on."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
import structlog
from structlog.testing import capture_logs

from headrace.v1 import error_pb2
from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import PROMPT, completion, failing
from tests.services.gateway.fakes import hang, say, until
from tests.services.otlp_collector import (
    PARENT,
    TRACE,
    TRACEPARENT,
    CollectedSpan,
    Collector,
    collecting_own_spans,
)

CLIENT = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
HTTP, GRPC = "POST /v1/completions", "headrace.v1.Inference/Generate"
SECRET = "a-confidential-text"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting_own_spans("gateway") as started:
        yield started


async def ended(collector: Collector, root: str = HTTP) -> CollectedSpan:
    """Wait for the span of a request, which is exported last, and return it."""
    await until(lambda: root in collector.names)
    return collector.named(root)


async def test_one_trace_has_the_stages_of_a_request(collector: Collector, site: Site) -> None:
    site.worker.script = say(*site.encode("a b c"))
    assert (await completion(site)).status_code == 200
    root = await ended(collector)
    assert {span.trace for span in collector.spans} == {root.trace}
    generation = collector.named(f"text_completion {site.model.name}")
    parents = {span.name: span.parent for span in collector.spans}
    assert parents == {
        HTTP: "",
        "receive": root.id,
        "tokenize": root.id,
        generation.name: root.id,
        "route": generation.id,
        "attempt": generation.id,
        "stream": generation.id,
    }
    assert all(root.contains(span) for span in collector.spans)
    order = ["receive", "tokenize", "route", "attempt", "stream"]
    starts = [collector.named(name).start_ns for name in order]
    assert starts == sorted(starts)
    assert not any(span.failed for span in collector.spans)


async def test_attributes_follow_the_semantic_conventions(collector: Collector, site: Site) -> None:
    site.worker.script = say(5, 6, 7)
    response = await completion(site, temperature=0.5, n=1, top_k=7)
    root = await ended(collector)
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "headrace.request.id": response.headers["x-request-id"],
    }
    generation = collector.named(f"text_completion {site.model.name}").attributes
    assert generation.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert generation == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": site.model.name,
        "gen_ai.response.model": site.model.name,
        "gen_ai.request.max_tokens": PROMPT["max_tokens"],
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
        "headrace.request.id": response.headers["x-request-id"],
    }
    assert collector.named("attempt").attributes == {
        "headrace.attempt": 0,
        "headrace.decode_worker": "decode-0",
        "headrace.prefill_worker": "prefill-0",
        "headrace.outcome": "ok",
    }


async def test_trace_has_no_text_of_the_request(collector: Collector, site: Site) -> None:
    site.worker.script = say(*site.encode(SECRET))
    messages = [{"role": "user", "content": SECRET}]
    body = {"messages": messages, "stop": [SECRET], "user": SECRET, "max_tokens": 9}
    await site.http.post("/v1/chat/completions", json=body)
    await ended(collector, "POST /v1/chat/completions")
    assert collector.named(f"chat {site.model.name}")
    assert not any(SECRET.encode() in payload for payload in collector.payloads)


async def test_context_of_an_http_client_is_continued_to_router_and_worker(
    collector: Collector, site: Site
) -> None:
    site.worker.script = say(5)
    await site.http.post("/v1/completions", json=PROMPT, headers=CLIENT)
    root = await ended(collector)
    assert (root.trace, root.parent) == (TRACE, PARENT)
    route, attempt = collector.named("route"), collector.named("attempt")
    assert [h["traceparent"][:52] for h in site.router.headers] == [f"00-{TRACE}-{route.id}"]
    assert [h["tracestate"] for h in site.router.headers] == ["vendor=1"]
    sent = site.worker.streams[0].start.trace
    assert sent.traceparent.startswith(f"00-{TRACE}-{attempt.id}-")
    assert sent.tracestate == "vendor=1"


async def test_context_of_a_grpc_client_is_continued(collector: Collector, site: Site) -> None:
    site.worker.script = say(5)
    request = pb.GenerateRequest(text="x")
    metadata = tuple(CLIENT.items())
    assert [r async for r in InferenceStub(site.rpc).Generate(request, metadata=metadata)]
    root = await ended(collector, GRPC)
    assert (root.trace, root.parent) == (TRACE, PARENT)
    assert (root.attributes["rpc.system.name"], root.attributes["rpc.method"]) == ("grpc", GRPC)
    assert collector.named("tokenize").parent == root.id


@pytest.mark.parametrize(
    "context", [{"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}]
)
async def test_malformed_context_of_a_client_begins_a_trace(
    context: dict[str, str], collector: Collector, site: Site
) -> None:
    site.worker.script = say(5)
    response = await site.http.post("/v1/completions", json=PROMPT, headers=context)
    assert response.status_code == 200
    root = await ended(collector)
    assert root.parent == ""
    assert root.trace != TRACE


async def test_unsampled_context_is_sent_on_and_not_recorded(
    collector: Collector, site: Site
) -> None:
    site.worker.script = say(5)
    context = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    await site.http.post("/v1/completions", json=PROMPT, headers=context)
    sent = site.worker.streams[0].start.trace.traceparent
    assert sent.startswith(f"00-{TRACE}-")
    assert sent.endswith("-00")
    site.worker.queued = [say(5)]
    await completion(site)
    await ended(collector)
    assert TRACE not in {span.trace for span in collector.spans}


async def test_failover_has_one_span_for_each_attempt(
    collector: Collector, open_site: OpenSite
) -> None:
    site: Site = await open_site(workers=2)
    site.workers[0].script = failing(error_pb2.ERROR_CODE_TRANSFER_FAILED, 5, 6)
    site.workers[1].script = say(5, 6, 7)
    assert (await completion(site)).status_code == 200
    root = await ended(collector)
    generation = collector.named(f"text_completion {site.model.name}")
    first, second = (span for span in collector.spans if span.name == "attempt")
    assert first.parent == second.parent == generation.id
    assert first.end_ns <= second.start_ns
    assert (first.failed, first.message) == (True, "scripted failure")
    assert first.attributes == {
        "headrace.attempt": 0,
        "headrace.decode_worker": "decode-0",
        "headrace.prefill_worker": "prefill-0",
        "headrace.outcome": "failed",
        "headrace.failed_worker": "decode-0",
        "error.type": "transfer_failed",
    }
    assert second.attributes["headrace.attempt"] == 1
    assert second.attributes["headrace.decode_worker"] == "decode-1"
    assert second.attributes["headrace.outcome"] == "ok"
    assert [s.attributes["headrace.attempt"] for s in collector.spans if s.name == "route"] == [
        0,
        1,
    ]
    assert not root.failed
    assert not generation.failed
    streams = [worker.streams[0].start.trace.traceparent[36:52] for worker in site.workers]
    assert streams == [first.id, second.id]


async def test_final_failure_is_the_status_of_the_request(
    collector: Collector, open_site: OpenSite
) -> None:
    site: Site = await open_site(max_attempts=1)
    site.worker.script = failing(error_pb2.ERROR_CODE_INTERNAL)
    assert (await completion(site)).status_code == 503
    root = await ended(collector)
    generation = collector.named(f"text_completion {site.model.name}")
    assert root.failed
    assert generation.failed
    assert root.attributes["http.response.status_code"] == 503
    assert root.attributes["error.type"] == generation.attributes["error.type"] == "unavailable"


async def test_failure_of_a_stream_keeps_the_status_that_was_sent(
    collector: Collector, open_site: OpenSite
) -> None:
    site: Site = await open_site(max_attempts=1)
    site.worker.script = failing(error_pb2.ERROR_CODE_INTERNAL, 5)
    assert (await completion(site, stream=True)).status_code == 200
    root = await ended(collector)
    assert root.failed
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["error.type"] == "unavailable"
    assert collector.named("stream")


async def test_error_of_the_client_is_not_a_failure(collector: Collector, site: Site) -> None:
    assert (await completion(site, temperature=9)).status_code == 400
    root = await ended(collector)
    assert not any(span.failed for span in collector.spans)
    assert root.attributes["error.type"] == "invalid_value"
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [r async for r in InferenceStub(site.rpc).Generate(pb.GenerateRequest())]
    rpc = await ended(collector, GRPC)
    assert not any(span.failed for span in collector.spans)
    assert rpc.attributes["error.type"] == "invalid_value"


async def test_client_that_leaves_ends_all_spans(collector: Collector, site: Site) -> None:
    site.worker.script = hang
    request = asyncio.create_task(completion(site))
    await site.router.started(1)
    request.cancel()
    root = await ended(collector)
    assert root.attributes["http.response.status_code"] == 499
    assert collector.named("attempt").attributes["headrace.outcome"] == "cancelled"
    assert not any(span.failed for span in collector.spans)


async def test_cancelled_grpc_call_is_marked_and_not_a_failure(
    collector: Collector, site: Site
) -> None:
    site.worker.script = hang
    call = InferenceStub(site.rpc).Generate(pb.GenerateRequest(text="x"))
    await site.router.started(1)
    call.cancel()
    root = await ended(collector, GRPC)
    assert not root.failed
    assert root.attributes["error.type"] == "client_closed_request"


async def test_each_prompt_of_a_request_has_its_generation(
    collector: Collector, site: Site
) -> None:
    site.worker.script = say(5)
    await completion(site, prompt=[[1, 2], [3]])
    root = await ended(collector)
    generations = [span for span in collector.spans if span.name.startswith("text_completion")]
    assert [span.parent for span in generations] == [root.id] * 2
    inputs = sorted(span.attributes["gen_ai.usage.input_tokens"] for span in generations)
    assert inputs == [1, 2]


async def test_probes_and_model_list_have_no_spans(collector: Collector, site: Site) -> None:
    site.worker.script = say(5)
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert (await site.http.get(path)).status_code == 200
    await completion(site)
    root = await ended(collector)
    assert {span.trace for span in collector.spans} == {root.trace}


async def test_log_lines_have_the_ids_of_the_trace(collector: Collector, site: Site) -> None:
    site.worker.script = say(5)
    merge = structlog.contextvars.merge_contextvars
    with capture_logs(processors=[merge]) as lines:
        await completion(site)
        root = await ended(collector)
    answered = [line for line in lines if line["event"] == "answered"]
    assert [(line["trace_id"], line["span_id"]) for line in answered] == [(root.trace, root.id)]


async def test_without_tracing_no_context_is_sent(site: Site) -> None:
    site.worker.script = say(5)
    await site.http.post("/v1/completions", json=PROMPT, headers=CLIENT)
    assert not site.worker.streams[0].start.HasField("trace")
    assert "traceparent" not in site.router.headers[0]


async def test_unknown_path_has_no_route(collector: Collector, site: Site) -> None:
    assert (await site.http.post(f"/{SECRET}" + "x" * 1000)).status_code == 404
    root = await ended(collector, "POST")
    assert "http.route" not in root.attributes
    assert len(root.attributes["url.path"]) == 300
