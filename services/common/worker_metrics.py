"""What prefill and decode workers measure; names as the field uses them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class WorkerMetrics:
    """The metrics of one worker process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"headrace_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"headrace_{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(
                f"headrace_{name}_seconds", text, labels, registry=self.registry, buckets=_SECONDS
            )

        self.requests = counter("requests", "sequences ended", "endpoint", "status")
        self.stages = seconds("request_stage", "time of a sequence in each stage", "stage")
        self.running = gauge("num_requests_running", "sequences in the batch")
        self.waiting = gauge("num_requests_waiting", "sequences waiting")
        self.queue_tokens = gauge("queue_tokens", "tokens accepted and not yet finished")
        self.pages_free = gauge("kv_pages_free", "free KV pages")
        self.cache_usage = gauge("kv_cache_usage_perc", "used KV pages, 0 to 1")
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens taken in")
        self.generation_tokens = counter("generation_tokens", "tokens sampled")
        self.transfer_bytes = counter("kv_transfer_bytes", "KV moved, raw and on the wire", "kind")
        self.transfer_seconds = seconds("kv_transfer", "READ of one segment")
        self.compress_ratio = gauge("kv_compress_ratio", "raw over wire bytes since the start")
        self.encode_seconds = seconds("kv_encode", "encode of one segment")
        self.decode_seconds = seconds("kv_decode", "verify and decode of one segment")
        self.escape_rate = gauge("kv_escape_rate", "share of values outside the codebook")
        self.slab_slots = gauge("kv_slab_slots_in_use", "slots of encoded KV, not yet acknowledged")
        self.landing_slots = gauge("kv_landing_slots", "landing slots that are not free", "state")
        self.leases = gauge("kv_lease_active", "leases held")
        self.leases_expired = counter("kv_lease_expired", "leases that expired")
        self.integrity_failures = counter("kv_integrity_failures", "segments not verified")
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
