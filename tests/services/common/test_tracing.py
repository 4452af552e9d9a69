"""Spans, their export over OTLP, and what a process without an endpoint does not do."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import enumerate as enumerate_threads

import pytest

from services.common import otlp
from services.common.errors import InternalFault, QueueTimeout, SettingsError
from services.common.otlp import exporting
from services.common.tracing import NO_SPAN, Headers, Kind, Span, begin, resume
from services.gateway.settings import GatewaySettings
from services.router.settings import RouterSettings
from tests.services.otlp_collector import PARENT, TRACE, TRACEPARENT, Collector, collecting

SAMPLED = {"traceparent": TRACEPARENT}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
MALFORMED = {
    "empty": "",
    "text": "no context",
    "zero trace": f"00-{'0' * 32}-{PARENT}-01",
    "zero span": f"00-{TRACE}-{'0' * 16}-01",
    "reserved version": f"ff-{TRACE}-{PARENT}-01",
    "short": f"00-{TRACE[1:]}-{PARENT}-01",
    "further field": f"{TRACEPARENT}-more",
    "repeated": f"{TRACEPARENT},{TRACEPARENT}",
    "oversize": f"01-{TRACE}-{PARENT}-01-" + "x" * 1000,
}
ENVIRONMENT = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_SERVICE_NAME",
]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started


def headers(given: dict[str, str]) -> Headers:
    return lambda name: [given[name]] if name in given else []


def sampled(span: Span) -> bool:
    return bool(int(span.headers["traceparent"][-2:], 16) & 1)


def settings(collector: Collector, **changes: object) -> GatewaySettings:
    return GatewaySettings.model_validate({"otlp_endpoint": collector.url, **changes})


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_collector_gets_spans_with_parents_and_attributes(protocol: str) -> None:
    with collecting(protocol) as collector:
        given = settings(collector, otlp_protocol=protocol)
        with exporting("gateway", given), begin("request", headers({}), {"a": 1}) as span:
            child = span.child("child", Kind.CLIENT, {"texts": ["x", "y"]})
            child.end()
            span.rename("renamed")
        root, child_ = collector.named("renamed"), collector.named("child")
    assert (root.service, root.kind, root.parent) == ("headrace-gateway", "server", "")
    assert root.attributes == {"a": 1}
    assert (child_.kind, child_.parent, child_.trace) == ("client", root.id, root.trace)
    assert child_.attributes == {"texts": ["x", "y"]}
    assert root.contains(child_)
    assert span.ids == {"trace_id": root.trace, "span_id": root.id}
    assert span.headers["traceparent"].startswith(f"00-{root.trace}-{root.id}-")
    assert sampled(span)


def test_client_trace_is_continued_with_its_state(collector: Collector) -> None:
    with exporting("gateway", settings(collector)):
        span = begin("request", headers({**SAMPLED, "tracestate": "vendor=1"}), {})
        assert span.headers["tracestate"] == "vendor=1"
        span.end()
    assert (collector.named("request").trace, collector.named("request").parent) == (TRACE, PARENT)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_context_is_ignored(name: str, collector: Collector) -> None:
    given = headers({"traceparent": MALFORMED[name]})
    with exporting("gateway", settings(collector)):
        assert resume("call", given, {}) is NO_SPAN
        begin("request", given, {}).end()
    assert collector.named("request").parent == ""
    assert collector.named("request").trace != TRACE


@pytest.mark.parametrize(
    "state", ["not a state", "x" * 513, ",".join(f"k{i}=v" for i in range(40))]
)
def test_malformed_state_does_not_affect_the_trace(
    state: str, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    with exporting("gateway", settings(collector)):
        span = begin("request", headers({**SAMPLED, "tracestate": state}), {})
        assert len(span.headers.get("tracestate", "")) <= 512
        span.end()
    assert collector.named("request").trace == TRACE
    assert not caplog.records  # clients could fill the log


def test_call_without_context_has_no_span(collector: Collector) -> None:
    with exporting("router", settings(collector)):
        assert resume("call", headers({}), {}) is NO_SPAN
        assert resume("call", headers(SAMPLED), {}) is not NO_SPAN


def test_unsampled_trace_keeps_its_id_and_is_not_exported(collector: Collector) -> None:
    with exporting("gateway", settings(collector)):
        with begin("request", headers(UNSAMPLED), {}) as span:
            assert not span.recording
            assert span.ids["trace_id"] == TRACE
            assert not sampled(span)
            span.child("child").end()
            span.record("stage", 0.0, 1.0)
        resume("call", headers(dict(span.headers)), {}).end()
        begin("other", headers({}), {}).end()
    assert collector.names == ["other"]


def test_ratio_applies_to_traces_that_begin_here(collector: Collector) -> None:
    with exporting("gateway", settings(collector, trace_ratio=0.0)):
        begin("new", headers({}), {}).end()
        begin("continued", headers(SAMPLED), {}).end()
    assert collector.names == ["continued"]


def test_sampler_of_the_environment_applies(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with exporting("gateway", settings(collector)):
        begin("request", headers(SAMPLED), {}).end()
    assert collector.names == []


def test_recorded_stage_has_its_own_times(collector: Collector) -> None:
    given = settings(collector)
    with exporting("decode", given), resume("call", headers(SAMPLED), {}) as span:
        start = time.perf_counter()
        time.sleep(0.002)
        end = time.perf_counter()
        time.sleep(0.002)
        span.record("stage", start, end, {"n": 2})
    call, stage = collector.named("call"), collector.named("stage")
    assert stage.parent == call.id
    assert stage.end_ns - stage.start_ns == pytest.approx((end - start) * 1e9, abs=1000)
    assert call.contains(stage)
    assert call.end_ns - stage.end_ns >= 2_000_000
    assert abs(call.end_ns / 1e9 - time.time()) < 5


def test_errors_mark_a_span_as_failed_once(collector: Collector) -> None:
    def fail(span: Span, error: BaseException) -> None:
        with pytest.raises(type(error)), span:
            raise error

    with exporting("gateway", settings(collector)):
        fail(begin("service error", headers({}), {}), InternalFault("no" + "!" * 1000))
        fail(begin("status 429", headers({}), {}), QueueTimeout("too long"))
        fail(begin("other error", headers({}), {}), ValueError("no"))
        fail(begin("cancelled", headers({}), {}), asyncio.CancelledError())
        first = begin("first", headers({}), {})
        first.fail("reason", "first")
        fail(first, ValueError("second"))
    reasons = {span.name: span.attributes.get("error.type") for span in collector.spans}
    assert reasons == {
        "service error": InternalFault.code,
        "status 429": QueueTimeout.code,
        "other error": "ValueError",
        "cancelled": "cancelled",
        "first": "reason",
    }
    assert [s.name for s in collector.spans if not s.failed] == ["status 429", "cancelled"]
    assert collector.named("first").message == "first"
    assert len(collector.named("service error").message) == 300


def test_end_does_not_wait_for_an_unreachable_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_FLUSH_S", 0.05)
    given = GatewaySettings.model_validate({"otlp_endpoint": "http://127.0.0.1:9"})
    with exporting("gateway", given):
        begin("request", headers({}), {}).end()
    exporters = [thread for thread in enumerate_threads() if thread.name.startswith("OtelBatch")]
    assert exporters  # one still tries
    assert all(thread.daemon for thread in exporters)


def test_slow_collector_loses_spans_but_blocks_nothing(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MAX_QUEUE_SIZE": 8, "MAX_EXPORT_BATCH_SIZE": 4}.items():
        monkeypatch.setenv(f"OTEL_BSP_{name}", str(value))
    collector.answers.clear()
    with monkeypatch.context() as patch:  # ends before that of the collector
        patch.setattr(otlp, "_FLUSH_S", 0.05)
        with exporting("gateway", settings(collector)):
            for _ in range(200):
                begin("request", headers({}), {}).end()
    assert not collector.spans  # the exporter still waits for its first answer
    collector.answers.set()
    collector.wait_for(lambda found: len(found.spans) >= 4)
    assert len(collector.spans) <= 16


def test_attributes_of_the_environment_name_the_process(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,k8s.pod.name=pod-1")
    with exporting("gateway", settings(collector)):
        begin("request", headers({}), {}).end()
    assert collector.named("request").service == "mine"


BASE, TRACES = "http://collector:4318", "https://other/custom"


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": BASE + "/"}, BASE + "/v1/traces"),
        (
            {"HEADRACE_OTLP_ENDPOINT": BASE, "OTEL_EXPORTER_OTLP_ENDPOINT": TRACES},
            BASE + "/v1/traces",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": TRACES}, TRACES),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": BASE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": TRACES},
            TRACES,
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, BASE),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": BASE, "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": BASE, "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_endpoint_comes_from_settings_or_standard_variables(
    environment: dict[str, str], url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert RouterSettings.load([]).traces_url == url


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--otlp-endpoint", "collector:4318"),
        ("--otlp-protocol", "http/json"),
        ("--trace-ratio", "2"),
    ],
)
def test_invalid_tracing_setting_is_named(flag: str, value: str) -> None:
    with pytest.raises(SettingsError, match=flag[2:].replace("-", "_")):
        RouterSettings.load([flag, value])


def test_invalid_variable_of_the_sdk_is_a_settings_error(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "5")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "6")
    with pytest.raises(SettingsError, match="max_export_batch_size"):
        exporting("gateway", settings(collector)).__enter__()


def run_python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_missing_packages_are_a_settings_error(tmp_path: Path) -> None:
    arguments = ["headrace", "router", "--otlp-endpoint", "http://127.0.0.1:9", "--port", "0"]
    done = run_python(
        "import sys; sys.modules['opentelemetry.sdk'] = None; "
        f"sys.argv = {arguments}; from services.cli import app; app()"
    )
    assert done.returncode == 2, done.stderr
    assert f"`{sys.executable} -m pip install 'headrace[tracing]'`" in done.stderr
    assert "Traceback" not in done.stderr
