"""Traces of requests through four real processes, at a collector in this process."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.harness.deployment import Running, deployed
from tests.services.otlp_collector import PARENT, CollectedSpan, Collector, collecting

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HTTP, PLACE = "POST /v1/chat/completions", "POST /v1/place"
STREAM, PROMPT = "Decode/StartStream", "Prefill/StartPrefill"
GATEWAY, ROUTER, PREFILL, DECODE = (
    f"headrace-{service}" for service in ("gateway", "router", "prefill", "decode")
)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started


@pytest.fixture(scope="module")
def running(collector: Collector) -> Iterator[Running]:
    levels = {f"HEADRACE_{s}_LOG_LEVEL": "debug" for s in ("ROUTER", "PREFILL", "DECODE")}
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "HEADRACE_DECODE_COMPUTE_TOKENS": "0",  # the same chat is fetched every time
        **levels,
    }
    with deployed("--decode", "2", environment=environment) as deployment:
        deployment.wait_for_all_workers()
        yield deployment


def chat(running: Running, trace: str, *, max_tokens: int) -> list[str]:
    """Send a chat with a trace context, and return the lines of the streamed answer."""
    body = {
        "model": running.model,
        "messages": [{"role": "user", "content": "Tell me a story. " * 30}],
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    response = httpx.post(
        f"{running.url}/v1/chat/completions",
        json=body,
        headers={"traceparent": f"00-{trace}-{PARENT}-01"},
        timeout=300,
        trust_env=False,
    )
    return response.raise_for_status().text.splitlines()


def spans_of(collector: Collector, trace: str, *names: str) -> list[CollectedSpan]:
    """Wait until a trace has spans with these names, and return all of its spans."""

    def found() -> list[CollectedSpan]:
        return [span for span in list(collector.spans) if span.trace == trace]

    collector.wait_for(lambda _: set(names) <= {span.name for span in found()})
    return found()


def test_one_request_is_one_trace_with_all_stages(running: Running, collector: Collector) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    collector.spans.clear()
    assert chat(running, trace, max_tokens=8)[-2] == "data: [DONE]"
    spans = spans_of(collector, trace, HTTP, PLACE, STREAM, PROMPT, "fetch_kv")
    assert {span.trace for span in collector.spans} == {trace}
    names = {span.id: span.name for span in spans} | {PARENT: "client"}
    generation = f"chat {running.model}"
    assert sorted((s.service, s.name, names[s.parent]) for s in spans if s.name != "reserve") == [
        (DECODE, STREAM, "attempt"),
        (DECODE, "decode", STREAM),
        (DECODE, "decode_kv", "fetch_kv"),
        (DECODE, "fetch_kv", STREAM),
        (DECODE, "transfer", "fetch_kv"),
        (GATEWAY, HTTP, "client"),
        (GATEWAY, "attempt", generation),
        (GATEWAY, generation, HTTP),
        (GATEWAY, "receive", HTTP),
        (GATEWAY, "route", generation),
        (GATEWAY, "stream", generation),
        (GATEWAY, "tokenize", HTTP),
        (PREFILL, PROMPT, "fetch_kv"),
        (PREFILL, "encode", PROMPT),
        (PREFILL, "prefill", PROMPT),
        (PREFILL, "queue", PROMPT),
        (ROUTER, PLACE, "route"),
    ]
    by_name = {span.name: span for span in spans}
    stages = ("receive", "tokenize", "route", "attempt", "queue", "prefill", "encode", "transfer")
    starts = [by_name[name].start_ns for name in (*stages, "decode_kv", "decode")]
    assert starts == sorted(starts)  # one host has one clock
    assert all(by_name[HTTP].contains(span) for span in spans if span.name != PROMPT)
    usage = by_name[generation].attributes
    assert usage["gen_ai.usage.input_tokens"] > 100
    assert usage["gen_ai.usage.output_tokens"] == 8
    assert not any(b"Tell me a story" in payload for payload in collector.payloads)


def test_log_lines_of_all_processes_have_the_trace_id(
    running: Running, collector: Collector
) -> None:
    trace = "1af7651916cd43dd8448eb211c80319c"
    chat(running, trace, max_tokens=2)
    spans = {span.name: span for span in spans_of(collector, trace, HTTP, PLACE, STREAM, PROMPT)}
    events = {"gateway": "answered", "router": "place", "prefill-0": "prefill admitted"}
    lines = [
        record
        for process, event in events.items()
        for record in running.records(process, event)
        if record.get("trace_id") == trace
    ]
    expected = [spans[name].id for name in (HTTP, PLACE, PROMPT)]
    assert [line["span_id"] for line in lines] == expected


@pytest.mark.long
def test_failover_is_a_second_attempt_in_the_same_trace(
    running: Running, collector: Collector
) -> None:
    trace = "2af7651916cd43dd8448eb211c80319c"
    killed: list[str] = []

    def kill_busy_decode_worker() -> None:
        while not killed:
            for name, worker in running.workers().items():
                if name.startswith("decode") and worker["running"]:
                    os.kill(running.state.pids[name], signal.SIGKILL)
                    killed.append(name)
            time.sleep(0.02)

    running.wait_until_idle()  # the router still counts an earlier request otherwise
    killer = threading.Thread(target=kill_busy_decode_worker, daemon=True)
    killer.start()
    lines = chat(running, trace, max_tokens=512)
    killer.join(60)
    assert lines[-2] == "data: [DONE]"
    assert "error" not in json.loads(lines[-4].removeprefix("data: "))
    spans = spans_of(collector, trace, HTTP, STREAM, PROMPT)
    first, second = sorted(
        (span for span in spans if span.name == "attempt"), key=lambda span: span.start_ns
    )
    assert first.parent == second.parent
    assert first.attributes["error.type"] == "worker_lost"
    assert [first.attributes["headrace.decode_worker"]] == killed
    assert second.attributes["headrace.outcome"] == "ok"
    (stream,) = (span for span in spans if span.name == STREAM)  # the killed worker sent none
    assert stream.parent == second.id
    assert len([span for span in spans if span.name == "route"]) == 2
