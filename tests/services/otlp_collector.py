"""A collector that receives spans over OTLP, by HTTP or gRPC, and keeps them."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from services.common.otlp import exporting
from services.common.settings import ServiceSettings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
"""Trace id and span id of a caller."""
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
"""Context of the caller's trace, which is sampled."""


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it arrived. Ids are in hexadecimal; a root has an empty ``parent``."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    message: str

    def contains(self, other: "CollectedSpan") -> bool:
        """Return whether the other span's time lies within this one's."""
        return self.start_ns <= other.start_ns <= other.end_ns <= self.end_ns


@dataclass
class Collector:
    """Spans that have arrived, and the URL of the receiver.

    Attributes:
        payloads: exported messages, encoded.
        answers: cleared to block exporters until it is set.
    """

    spans: list[CollectedSpan] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    answers: Event = field(default_factory=Event)
    url: str = ""

    def named(self, name: str) -> CollectedSpan:
        """Return the only span with this name."""
        found = [span for span in self.spans if span.name == name]
        assert len(found) == 1, (name, self.names)
        return found[0]

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def wait_for(self, condition: Callable[["Collector"], bool], limit_s: float = 60.0) -> None:
        """Wait until a condition of the spans holds.

        Raises:
            AssertionError: if it does not in time.
        """
        deadline = time.monotonic() + limit_s
        while not condition(self):
            assert time.monotonic() < deadline, self.names
            time.sleep(0.05)

    def take(self, request: ExportTraceServiceRequest) -> None:
        self.answers.wait(30)
        self.payloads.append(request.SerializeToString())
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_collected(service, span) for span in scope.spans]


def _collected(service: str, span: Span) -> CollectedSpan:
    return CollectedSpan(
        service,
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        span.status.code == Status.STATUS_CODE_ERROR,
        span.status.message,
    )


def _values(attributes: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {attribute.key: value(attribute.value) for attribute in attributes}


@contextmanager
def collecting(protocol: str = "http/protobuf") -> Iterator[Collector]:
    """Run a collector on a free port of loopback until the block ends."""
    collector = Collector()
    collector.answers.set()
    with _grpc_server(collector) if protocol == "grpc" else _http_server(collector) as port:
        collector.url = f"http://127.0.0.1:{port}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("services.common.otlp._FLUSH_S", 60.0)  # no span of a test is lost
            yield collector
        collector.answers.set()


@contextmanager
def collecting_own_spans(service: str) -> Iterator[Collector]:
    """Run a collector for the spans of this process, which are exported every 10 ms."""
    with pytest.MonkeyPatch.context() as environment, collecting() as collector:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        settings = ServiceSettings.model_validate({"otlp_endpoint": collector.url})
        with exporting(service, settings):
            yield collector


@contextmanager
def _http_server(collector: Collector) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found = self.path == "/v1/traces"
            if found:
                collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def _grpc_server(collector: Collector) -> Iterator[int]:
    class Service(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0)
