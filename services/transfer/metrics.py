"""Metrics of KV transfers, registered beside those of the worker."""

from contextlib import suppress
from itertools import product

from prometheus_client import CollectorRegistry

from services.common.metrics import MetricFactory
from services.transfer.drift import EscapeDrift, Escapes
from services.transfer.policy import LinkView, WireMode


class TransferMetrics:
    """The transfer metrics of one worker process, for both roles."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricFactory(registry)
        self._bytes = make.counter(
            "kv_transfer_bytes",
            "bytes of transferred KV: raw as in the pages, wire as sent",
            "kind",
        )
        self._tokens = make.counter(
            "kv_transfer_tokens", "tokens of completely transferred sequences, also evicted ones"
        )
        self._read_seconds = make.seconds("kv_transfer", "READ of one segment")
        self._ratio = make.gauge("kv_compress_ratio", "raw bytes over wire bytes since the start")
        self._encode_seconds = make.seconds("kv_encode", "encode of one segment")
        self._decode_seconds = make.seconds("kv_decode", "verify and decode of one segment")
        self._escape_rate = make.gauge(
            "kv_escape_rate", "share of recently coded values whose exponent has no code"
        )
        self._escape_rate_expected = make.gauge(
            "kv_escape_rate_expected",
            "share of values without a code in the calibration sample of the codebooks",
        )
        self._recalibration_advised = make.gauge(
            "kv_recalibration_advised", "1: the escape rate is far above that of the calibration"
        )
        self._segments = make.counter("kv_segments", "segments encoded", "mode")
        self._wire_mode = make.gauge(
            "kv_wire_mode", "1: the mode chosen for this link", "peer", "mode"
        )
        self._link_speed = make.gauge(
            "kv_link_bytes_per_second", "wire bytes per second of READs from this worker", "peer"
        )
        self._encode_speed = make.gauge(
            "kv_encode_bytes_per_second", "KV bytes per second through the encoder", "mode"
        )
        self._decode_speed = make.gauge(
            "kv_decode_bytes_per_second",
            "KV bytes per second through the reader's decoder",
            *("peer", "mode"),
        )
        self.slab_slots = make.gauge(
            "kv_slab_slots_in_use", "slots with encoded KV that is not acknowledged yet"
        )
        self.landing_slots = make.gauge(
            "kv_landing_slots", "landing slots that are not free", "state"
        )
        self.leases = make.gauge("kv_lease_active", "leases held")
        self.leases_expired = make.counter("kv_lease_expired", "leases that expired")
        self.integrity_failures = make.counter(
            "kv_integrity_failures", "segments that failed verification"
        )
        self._raw_total = self._wire_total = 0
        self._drift = EscapeDrift()

    def encoded(
        self, mode: WireMode, raw_bytes: int, wire_bytes: int, escapes: Escapes, seconds: float
    ) -> None:
        """Record one encoded segment."""
        self._count(raw_bytes, wire_bytes)
        if mode is WireMode.SPLITZIP:
            self._drift.add(escapes.elements, escapes.found, escapes.expected_rate)
        self._escape_rate.set(self._drift.rate)
        self._escape_rate_expected.set(self._drift.expected)
        self._recalibration_advised.set(self._drift.recalibrate)
        self._encode_seconds.observe(seconds)
        self._segments.labels(mode).inc()

    def received(self, raw_bytes: int, wire_bytes: int, read_s: float, decode_s: float) -> None:
        """Record one segment that was read, verified and decoded."""
        self._count(raw_bytes, wire_bytes)
        self._read_seconds.observe(read_s)
        self._decode_seconds.observe(decode_s)

    def completed(self, tokens: int) -> None:
        """Record a sequence whose segments have all arrived."""
        self._tokens.inc(tokens)

    def observe_link(self, peer: str, link: LinkView) -> None:
        """Set the gauges of one link to what the policy has measured so far."""
        for mode, speed in link.speeds.items():
            self._wire_mode.labels(peer, mode).set(mode is link.choice)
            if speed.encode is not None:
                self._encode_speed.labels(mode).set(speed.encode)
            if speed.decode is not None:
                self._decode_speed.labels(peer, mode).set(speed.decode)
        if link.bytes_per_second is not None:
            self._link_speed.labels(peer).set(link.bytes_per_second)

    def forget_link(self, peer: str) -> None:
        """Remove the gauges of a peer that has disconnected."""
        with suppress(KeyError):
            self._link_speed.remove(peer)
        for gauge, mode in product((self._wire_mode, self._decode_speed), WireMode):
            with suppress(KeyError):  # the link was never measured
                gauge.remove(peer, mode)

    def _count(self, raw_bytes: int, wire_bytes: int) -> None:
        self._bytes.labels("raw").inc(raw_bytes)
        self._bytes.labels("wire").inc(wire_bytes)
        self._raw_total += raw_bytes
        self._wire_total += wire_bytes
        self._ratio.set(self._raw_total / self._wire_total)
