"""Prometheus metrics of the gateway."""

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.v1 import decode_pb2

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class GatewayMetrics:
    """Metrics of one gateway. Each instance has its own registry.

    The set of label values is bounded: endpoints are routes, statuses are HTTP status codes, and
    reasons are error codes of the protocol.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_requests",
            "Requests completed, by endpoint and status",
            ["endpoint", "status"],
            registry=registry,
        )
        self.first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "headrace_inter_token_latency_seconds",
            "Seconds between consecutive tokens of a stream",
            buckets=_BETWEEN_TOKENS,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "headrace_e2e_request_latency_seconds",
            "Seconds from the arrival of a request to its last token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._stages = Histogram(
            "headrace_request_stage_seconds",
            "Seconds that a request spends in each stage",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "headrace_prompt_tokens", "Prompt tokens admitted", registry=registry
        )
        self.generation_tokens = Counter(
            "headrace_generation_tokens", "Tokens generated for clients", registry=registry
        )
        self.running = Gauge(
            "headrace_num_requests_running", "Prompts in progress", registry=registry
        )
        self.failovers = Counter(
            "headrace_failovers",
            "Retries after a worker failure, by reason",
            ["reason"],
            registry=registry,
        )

    def observe_routing(self, seconds: float) -> None:
        """Record the duration of a place call to the router, in seconds."""
        self._stages.labels("route").observe(seconds)

    def observe_stages(self, times: decode_pb2.StageTimes) -> None:
        """Record the stage times of a stream. A stage that was skipped is 0 and not recorded.

        Implausible times are ignored: one that is not a number would remain in the sum for ever.
        """
        for field, seconds in times.ListFields():
            if 0 < seconds < math.inf:
                self._stages.labels(field.name).observe(seconds)
