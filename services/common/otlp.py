"""OpenTelemetry: records the spans of `services.common.tracing` and exports them over OTLP.

Needs the packages of ``headrace[tracing]``; only a process with an OTLP endpoint imports this
module. Its provider is not the global one, so that no instrumented library adds spans.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from threading import Thread
from types import TracebackType

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common import tracing
from services.common.errors import ServiceError, SettingsError
from services.common.settings import ServiceSettings
from services.common.tracing import (
    MAX_CONTEXT_CHARS,
    MAX_TEXT_CHARS,
    NO_SPAN,
    Attributes,
    Headers,
    Kind,
    Span,
)

_FLUSH_S = 2.0
"""Time to export the remaining spans when the process ends, seconds."""
_PROPAGATOR = TraceContextTextMapPropagator()
_KINDS = {kind: trace.SpanKind[kind.name] for kind in Kind}


@contextmanager
def exporting(service: str, settings: ServiceSettings) -> Iterator[None]:
    """Record and export spans until the block ends.

    Spans are exported by a thread, from a queue that drops spans when it is full. At the end, the
    queued spans are exported for up to 2 s; the remaining ones are lost.

    Args:
        service: name of the service; its spans have the service name ``headrace-<service>``.

    Raises:
        SettingsError: if a variable ``OTEL_…`` is invalid.
    """
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)  # clients' malformed headers
    try:
        provider = _provider(service, settings)
    except (ValueError, OSError) as error:
        raise SettingsError(f"invalid setting of OpenTelemetry: {error}") from error
    tracing.install(partial(_start, provider.get_tracer("headrace", version("headrace"))))
    try:
        yield
    finally:
        tracing.install(None)
        flushing = Thread(target=provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_S)


def _provider(service: str, settings: ServiceSettings) -> TracerProvider:
    """Return a provider. Headers, TLS files, timeouts and the queue come from ``OTEL_…``."""
    ratio = settings.trace_ratio
    provider = TracerProvider(
        sampler=None if ratio is None else ParentBased(TraceIdRatioBased(ratio)),
        resource=_resource(service, settings),
        shutdown_on_exit=False,
    )
    url = settings.traces_url
    grpc = settings.otlp_protocol == "grpc"
    exporter: SpanExporter = GrpcExporter(url) if grpc else HttpExporter(url)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _resource(service: str, settings: ServiceSettings) -> Resource:
    """Return the attributes of this process. ``OTEL_RESOURCE_ATTRIBUTES`` override them."""
    instance = getattr(settings, "worker_id", f"{socket.gethostname()}-{os.getpid()}")
    own: dict[str, str | int] = {
        "service.name": f"headrace-{service}",
        "service.version": version("headrace"),
        "service.instance.id": instance,
    }
    if (ranks := getattr(settings, "tp", None)) is not None:
        own["headrace.ranks"] = ranks
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _start(
    tracer: trace.Tracer, name: str, headers: Headers, attributes: Attributes, *, may_begin: bool
) -> Span:
    """Start a span of kind SERVER; see `services.common.tracing.Recorder`."""
    parent = _PROPAGATOR.extract(_carrier(headers), Context())
    if not may_begin and not trace.get_current_span(parent).get_span_context().is_valid:
        return NO_SPAN
    return RecordedSpan(tracer, parent, _clock_ns(), name, Kind.SERVER, attributes)


def _clock_ns() -> int:
    """Return the difference between the system clock and `time.perf_counter`, nanoseconds.

    An interruption between the two readings would make it smaller, so it is the maximum of three.
    """
    return max(time.time_ns() - time.perf_counter_ns() for _ in range(3))


def _carrier(headers: Headers) -> dict[str, str]:
    """Return the W3C headers; repeated ones are joined, as proxies do."""
    joined = {name: ",".join(headers(name)) for name in ("traceparent", "tracestate")}
    return {name: value for name, value in joined.items() if 0 < len(value) <= MAX_CONTEXT_CHARS}


class RecordedSpan(Span):
    """A span in a trace; ``recording`` is False if the trace is not sampled.

    Args:
        parent: context with the parent span.
        clock_ns: difference between the system clock and `time.perf_counter`, nanoseconds. All
            spans of a request in one process share it, so that a step of the system clock does not
            change their durations and order.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        parent: Context,
        clock_ns: int,
        name: str,
        kind: Kind,
        attributes: Attributes | None,
        start: float = 0.0,
    ) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._failed = False
        self._span = tracer.start_span(
            name, parent, _KINDS[kind], attributes, start_time=self._time_ns(start)
        )
        self._context = trace.set_span_in_context(self._span, Context())
        self.recording = self._span.is_recording()

    @property
    def ids(self) -> dict[str, str]:
        context = self._span.get_span_context()
        return {
            "trace_id": trace.format_trace_id(context.trace_id),
            "span_id": trace.format_span_id(context.span_id),
        }

    @property
    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return carrier

    def child(
        self, name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes | None = None
    ) -> Span:
        return self._child(name, kind, attributes) if self.recording else self

    def record(
        self, name: str, start: float, end: float, attributes: Attributes | None = None
    ) -> None:
        if self.recording:
            self._child(name, Kind.INTERNAL, attributes, start).end(end)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def fail(self, error_type: str, message: str = "") -> None:
        if self._span.is_recording() and not self._failed:
            self._failed = True
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(trace.StatusCode.ERROR, message[:MAX_TEXT_CHARS] or None)

    def end(self, at: float = 0.0) -> None:
        if self._span.is_recording():
            self._span.end(self._time_ns(at))

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            # Cancelled by the client, a deadline or a shutdown. The span of the request has the
            # reason.
            self.set({"error.type": "cancelled"})
        elif isinstance(error, ServiceError) and error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self.set({"error.type": error.code})  # the client's error, not a failure of the service
        elif error is not None:
            self.fail(_error_type(error), str(error))
        self.end()

    def _child(
        self,
        name: str,
        kind: Kind,
        attributes: Attributes | None,
        start: float = 0.0,
    ) -> "RecordedSpan":
        return RecordedSpan(
            self._tracer, self._context, self._clock_ns, name, kind, attributes, start
        )

    def _time_ns(self, at: float) -> int:
        """Convert a time of `time.perf_counter` to nanoseconds since 1970; 0 stands for now."""
        return self._clock_ns + (int(at * 1e9) or time.perf_counter_ns())


def _error_type(error: BaseException) -> str:
    """Return the code or the reason of an error that has one, else the name of its class."""
    if isinstance(error, ServiceError):
        return error.code
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, str) else type(error).__qualname__
