"""What prefill and decode workers measure; names as the field uses them."""

from contextlib import suppress
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.transfer.drift import EscapeDrift, Escapes
from services.transfer.policy import LinkView, WireMode

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
        self.steps = counter("engine_steps", "steps of the engine")
        self.busy_seconds = counter("engine_busy_seconds", "what the engine's steps took")
        self.transfer_bytes = counter("kv_transfer_bytes", "KV moved, raw and on the wire", "kind")
        self.transfer_seconds = seconds("kv_transfer", "READ of one segment")
        self.compress_ratio = gauge("kv_compress_ratio", "raw over wire bytes since the start")
        self.encode_seconds = seconds("kv_encode", "encode of one segment")
        self.decode_seconds = seconds("kv_decode", "verify and decode of one segment")
        self.escape_rate = gauge("kv_escape_rate", "share of coded values without a code, lately")
        self.escape_rate_expected = gauge(
            "kv_escape_rate_expected", "the same of what the codebooks were calibrated on"
        )
        self.recalibration_advised = gauge(
            "kv_recalibration_advised", "1: escapes are far more than when it was calibrated"
        )
        self.segments = counter("kv_segments", "segments encoded", "mode")
        self.wire_mode = gauge("kv_wire_mode", "1: the mode chosen for this link", "peer", "mode")
        self.link_speed = gauge("kv_link_bytes_per_second", "READs from here, wire bytes", "peer")
        self.encode_speed = gauge(
            "kv_encode_bytes_per_second", "KV bytes through the encoder", "mode"
        )
        self.decode_speed = gauge(
            "kv_decode_bytes_per_second", "KV bytes through the reader's decoder", "peer", "mode"
        )
        self.slab_slots = gauge("kv_slab_slots_in_use", "slots of encoded KV, not yet acknowledged")
        self.landing_slots = gauge("kv_landing_slots", "landing slots that are not free", "state")
        self.leases = gauge("kv_lease_active", "leases held")
        self.leases_expired = counter("kv_lease_expired", "leases that expired")
        self.integrity_failures = counter("kv_integrity_failures", "segments not verified")
        self.info = gauge(
            "worker_info", "1; what computes", "model", "products", "attention", "kernel_plan"
        )
        self._raw = self._wire = 0
        self._steps, self._busy_s = 0, 0.0
        self._drift = EscapeDrift()

    def encoded(
        self, mode: WireMode, raw_bytes: int, wire_bytes: int, escapes: Escapes, seconds: float
    ) -> None:
        """One segment was encoded; KV values are two bytes each."""
        self._count(raw_bytes, wire_bytes)
        if mode is WireMode.SPLITZIP:
            self._drift.add(raw_bytes // 2, escapes.found, escapes.expected_rate)
        self.escape_rate.set(self._drift.rate)
        self.escape_rate_expected.set(self._drift.expected)
        self.recalibration_advised.set(self._drift.recalibrate)
        self.encode_seconds.observe(seconds)
        self.segments.labels(mode).inc()

    def received(self, raw_bytes: int, wire_bytes: int, read_s: float, decode_s: float) -> None:
        """One segment was read, verified and decoded."""
        self._count(raw_bytes, wire_bytes)
        self.transfer_seconds.observe(read_s)
        self.decode_seconds.observe(decode_s)

    def observe_link(self, peer: str, link: LinkView) -> None:
        """What the policy knows of a link, as far as it was measured."""
        for mode, speed in link.speeds.items():
            self.wire_mode.labels(peer, mode).set(mode is link.choice)
            if speed.encode is not None:
                self.encode_speed.labels(mode).set(speed.encode)
            if speed.decode is not None:
                self.decode_speed.labels(peer, mode).set(speed.decode)
        if link.bytes_per_second is not None:
            self.link_speed.labels(peer).set(link.bytes_per_second)

    def forget_link(self, peer: str) -> None:
        """The peer is gone, and its labels with it."""
        with suppress(KeyError):
            self.link_speed.remove(peer)
        for gauge, mode in product((self.wire_mode, self.decode_speed), WireMode):
            with suppress(KeyError):  # it was not measured
                gauge.remove(peer, mode)

    def observe_load(
        self, *, running: int, waiting: int, queue_tokens: int, free: int, total: int
    ) -> None:
        self.running.set(running)
        self.waiting.set(waiting)
        self.queue_tokens.set(queue_tokens)
        self.pages_free.set(free)
        self.cache_usage.set(1 - free / total)

    def observe_steps(self, steps: int, busy_s: float) -> None:
        """Since the start."""
        self.steps.inc(steps - self._steps)
        self.busy_seconds.inc(busy_s - self._busy_s)
        self._steps, self._busy_s = steps, busy_s

    def _count(self, raw_bytes: int, wire_bytes: int) -> None:
        self.transfer_bytes.labels("raw").inc(raw_bytes)
        self.transfer_bytes.labels("wire").inc(wire_bytes)
        self._raw += raw_bytes
        self._wire += wire_bytes
        self.compress_ratio.set(self._raw / self._wire)
