"""Prometheus metrics of the gateway: the service as its clients see it."""

from headrace.v1 import decode_pb2, error_pb2
from runtime.grammar.spec import GrammarFault, GrammarKind
from services.common.metrics import MetricFactory, service_registry
from services.common.secret_metrics import SecretMetrics
from services.gateway.worker_failure import failure_reason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STAGES = ("route", "encode", *(field.name for field in decode_pb2.StageTimes.DESCRIPTOR.fields))


class GatewayMetrics:
    """Metrics of one gateway. Each instance has its own registry.

    The set of label values is bounded: endpoints are routes, statuses are HTTP status codes, and
    reasons are error codes of the protocol.
    """

    def __init__(self) -> None:
        self.registry = service_registry()
        self.secrets = SecretMetrics(self.registry)
        make = MetricFactory(self.registry)
        self.ready = make.gauge(
            "gateway_ready", "1 while requests can be served, NaN while draining, else 0."
        )
        self.requests = make.counter(
            "requests", "Client requests that have ended.", "endpoint", "status"
        )
        self.first_token = make.seconds(
            "time_to_first_token",
            "Seconds from the arrival of a request to its first token.",
            buckets=_SECONDS,
        )
        self.inter_token = make.seconds(
            "inter_token_latency",
            "Seconds between consecutive tokens of a choice.",
            buckets=_BETWEEN_TOKENS,
        )
        self.end_to_end = make.seconds(
            "e2e_request_latency",
            "Seconds from the arrival of a request to its last token.",
            buckets=_SECONDS,
        )
        self.stages = make.seconds(
            "request_stage", "Seconds of a request in each stage.", "stage", buckets=_SECONDS
        )
        for stage in _STAGES:
            self.stages.labels(stage)
        self.encode_latency = make.seconds(
            "encode_request_latency",
            "Seconds from the arrival of a request for embeddings or scores to its last output.",
            buckets=_SECONDS,
        )
        self.prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached_tokens = make.counter(
            "cached_prompt_tokens",
            "Prompt tokens of completed requests that no worker computed, counted as in usage.",
        )
        self.generation_tokens = make.counter(
            "generation_tokens",
            "Output tokens passed on to clients, counted as in usage.",
        )
        self.running = make.gauge("gateway_requests_running", "Prompts in progress.")
        self.failovers = make.counter(
            "failovers",
            "Retries after the failure of a worker, by reason.",
            "reason",
            values=map(failure_reason, error_pb2.ErrorCode.values()),
        )
        self.grammars = GrammarMetrics(make)


class GrammarMetrics:
    """Metrics of constraints on output, which the gateway compiles to check them."""

    def __init__(self, make: MetricFactory) -> None:
        self.compiled = make.counter(
            "grammars_compiled",
            "Constraints on output that were compiled; those of tool calls are grammars.",
            "kind",
            values=(kind.value for kind in GrammarKind),
        )
        self.cache_hits = make.counter(
            "grammar_cache_hits", "Constraints whose result was known from an earlier request."
        )
        self.refused = make.counter(
            "grammars_refused",
            "Constraints that were refused, by reason, also where any arguments of a function are "
            "allowed instead.",
            "reason",
            values=(fault.value for fault in GrammarFault),
        )
        self.compile_seconds = make.seconds(
            "grammar_compile", "Seconds of a compilation, without waiting for a process."
        )
        self.required_calls = make.counter(
            "required_tool_calls", "Requests whose output must be tool calls."
        )
