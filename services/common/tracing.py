"""Traces of requests: spans of this process, or stand-ins that record nothing.

`services.common.otlp` installs a recorder if there is an OTLP endpoint. Without one, `begin` and
`resume` return `NO_SPAN`, and OpenTelemetry is not imported.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

Headers = Callable[[str], Sequence[str]]
"""Function that returns all values of a request header, given its name in lower case."""

MAX_CONTEXT_CHARS = 512
"""Maximum characters of ``traceparent`` and of ``tracestate``; longer ones are ignored."""

MAX_TEXT_CHARS = 300
"""Maximum characters of a text from a request or an error that becomes part of a span."""


class Kind(Enum):
    """Relation of a span to its parent, named as in OpenTelemetry."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Span:
    """A span of a request. This class is a stand-in, whose methods do nothing.

    Used as a context manager, it ends with the block, and an exception marks it as failed. It is
    never the current span of OpenTelemetry's context, so that generators can hold it.

    Attributes:
        recording: whether the span will be exported. If not, attributes need not be computed.
    """

    recording = False

    @property
    def ids(self) -> Mapping[str, str]:
        """Fields ``trace_id`` and ``span_id`` for log lines; empty without tracing."""
        return {}

    @property
    def headers(self) -> Mapping[str, str]:
        """W3C headers that make the receiver's span a child of this one; empty without tracing."""
        return {}

    def child(
        self,
        name: str,  # noqa: ARG002 - nothing is recorded
        kind: Kind = Kind.INTERNAL,  # noqa: ARG002
        attributes: Attributes | None = None,  # noqa: ARG002
    ) -> "Span":
        """Start a child span, which the caller must end."""
        return self

    def record(
        self, name: str, start: float, end: float, attributes: Attributes | None = None
    ) -> None:
        """Record a child span that has ended already.

        Args:
            start: in seconds of `time.perf_counter`, as ``end``.
        """

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""

    def rename(self, name: str) -> None:
        """Change the name."""

    def fail(self, error_type: str, message: str = "") -> None:
        """Mark the span as failed. Later failures are ignored."""

    def end(self, at: float = 0.0) -> None:
        """End the span. Later calls of any method have no effect.

        Args:
            at: end, in seconds of `time.perf_counter`; 0: now.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        pass


NO_SPAN = Span()


class Recorder(Protocol):
    """Creates the spans of this process."""

    def __call__(
        self, name: str, headers: Headers, attributes: Attributes, *, may_begin: bool
    ) -> Span:
        """Start a span of kind SERVER, as a child of the span in the headers.

        Args:
            may_begin: without a valid context in the headers, whether to begin a new trace. If not,
                `NO_SPAN` is returned.
        """
        ...


_recorder: Recorder | None = None


def message_headers(context: Any) -> Headers:
    """Return the headers in a ``TraceContext`` message, whose fields are named like them."""
    return lambda name: (getattr(context, name),)


def install(recorder: Recorder | None) -> None:
    """Create all further spans through ``recorder``; None: record nothing."""
    global _recorder
    _recorder = recorder


def begin(name: str, headers: Headers, attributes: Attributes) -> Span:
    """Start the span of a client's request, in the client's trace if the headers name one."""
    if _recorder is None:
        return NO_SPAN
    return _recorder(name, headers, attributes, may_begin=True)


def resume(name: str, headers: Headers, attributes: Attributes) -> Span:
    """Start the span of a call from another service, or return `NO_SPAN` if it is not traced."""
    if _recorder is None:
        return NO_SPAN
    return _recorder(name, headers, attributes, may_begin=False)
