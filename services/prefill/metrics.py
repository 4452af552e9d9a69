"""Metrics of prefill workers alone."""

from prometheus_client import CollectorRegistry

from services.common.metrics import MetricFactory


class HistoryMetrics:
    """Metrics of the KV that a prefill worker reads from decode workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricFactory(registry)
        self.tokens = make.counter(
            "kv_history_tokens",
            "Prompt tokens whose KV was read from a decode worker instead of being computed.",
        )
        self.bytes = make.counter(
            "kv_history_bytes",
            "Bytes of KV, as in the pages, that were read from decode workers.",
        )
        self.failures = make.counter(
            "kv_history_failures",
            "READs from decode workers that failed, by reason; the tokens were computed.",
            "reason",
            values=("not_cached", "integrity", "deadline", "decode_lost"),
        )
