"""What prefill and decode workers measure; names as the field uses them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

STAGES = ("queue", "prefill", "encode", "transfer", "verify", "decode_kv", "decode")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class WorkerMetrics:
    """The metrics of one worker process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        known = {"registry": self.registry}
        self.requests = Counter(
            "headrace_requests", "sequences ended, by outcome", ["endpoint", "status"], **known
        )
        self.stages = Histogram(
            "headrace_request_stage_seconds",
            "time of a sequence in each stage",
            ["stage"],
            buckets=_SECONDS,
            **known,
        )
        self.running = Gauge("headrace_num_requests_running", "sequences in the batch", **known)
        self.waiting = Gauge("headrace_num_requests_waiting", "sequences waiting", **known)
        self.queue_tokens = Gauge(
            "headrace_queue_tokens", "tokens accepted and not yet finished", **known
        )
        self.pages_free = Gauge("headrace_kv_pages_free", "free KV pages", **known)
        self.cache_usage = Gauge("headrace_kv_cache_usage_perc", "used KV pages, 0 to 1", **known)
        self.prompt_tokens = Counter("headrace_prompt_tokens", "prompt tokens taken in", **known)
        self.generation_tokens = Counter("headrace_generation_tokens", "tokens sampled", **known)
        self.transfer_bytes = Counter(
            "headrace_kv_transfer_bytes", "KV moved, before and after the codec", ["kind"], **known
        )
        self.transfer_seconds = Histogram(
            "headrace_kv_transfer_seconds", "READ of one segment", buckets=_SECONDS, **known
        )
        self.compress_ratio = Gauge(
            "headrace_kv_compress_ratio", "raw over wire bytes since the start", **known
        )
        self.encode_seconds = Histogram(
            "headrace_kv_encode_seconds", "encode of one segment", buckets=_SECONDS, **known
        )
        self.decode_seconds = Histogram(
            "headrace_kv_decode_seconds", "decode of one segment", buckets=_SECONDS, **known
        )
        self.escape_rate = Gauge(
            "headrace_kv_escape_rate", "share of values outside the codebook", **known
        )
        self.leases = Gauge("headrace_kv_lease_active", "leases held", **known)
        self.leases_expired = Counter("headrace_kv_lease_expired", "leases that expired", **known)
        self.integrity_failures = Counter(
            "headrace_kv_integrity_failures", "segments that did not verify", **known
        )
        self._raw = self._wire = self._escapes = 0

    def encoded(self, raw_bytes: int, wire_bytes: int, escapes: int, seconds: float) -> None:
        """One segment was encoded; KV values are two bytes each."""
        self._count(raw_bytes, wire_bytes)
        self._escapes += escapes
        self.escape_rate.set(self._escapes / max(1, self._raw // 2))
        self.encode_seconds.observe(seconds)

    def received(self, raw_bytes: int, wire_bytes: int, read_s: float, decode_s: float) -> None:
        """One segment was read, verified and decoded."""
        self._count(raw_bytes, wire_bytes)
        self.transfer_seconds.observe(read_s)
        self.decode_seconds.observe(decode_s)

    def observe_load(
        self, *, running: int, waiting: int, queue_tokens: int, free: int, total: int
    ) -> None:
        self.running.set(running)
        self.waiting.set(waiting)
        self.queue_tokens.set(queue_tokens)
        self.pages_free.set(free)
        self.cache_usage.set(1 - free / total)

    def _count(self, raw_bytes: int, wire_bytes: int) -> None:
        self.transfer_bytes.labels("raw").inc(raw_bytes)
        self.transfer_bytes.labels("wire").inc(wire_bytes)
        self._raw += raw_bytes
        self._wire += wire_bytes
        self.compress_ratio.set(self._raw / self._wire)
