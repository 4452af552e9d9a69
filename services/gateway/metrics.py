"""What the gateway measures; names as the field uses them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.v1 import decode_pb2

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class GatewayMetrics:
    """The metrics of one gateway process, in a registry of their own.

    Label values are bounded: endpoints are routes, statuses are codes, reasons are the protocol's
    error codes.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_requests",
            "requests answered, by status",
            ["endpoint", "status"],
            registry=registry,
        )
        self.first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "from the request's arrival to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "headrace_inter_token_latency_seconds",
            "between two tokens of a stream",
            buckets=_BETWEEN_TOKENS,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "headrace_e2e_request_latency_seconds",
            "from the request's arrival to its last token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._stages = Histogram(
            "headrace_request_stage_seconds",
            "time of a request in each stage",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "headrace_prompt_tokens", "prompt tokens admitted", registry=registry
        )
        self.generation_tokens = Counter(
            "headrace_generation_tokens", "tokens passed to clients", registry=registry
        )
        self.running = Gauge(
            "headrace_num_requests_running", "prompts being answered", registry=registry
        )
        self.failovers = Counter(
            "headrace_failovers",
            "requests placed again, by what failed",
            ["reason"],
            registry=registry,
        )

    def routed(self, seconds: float) -> None:
        self._stages.labels("route").observe(seconds)

    def stages(self, times: decode_pb2.StageTimes) -> None:
        """What the workers report with the end of a stream; a stage that did not happen is 0."""
        for field, seconds in times.ListFields():
            self._stages.labels(field.name).observe(seconds)
