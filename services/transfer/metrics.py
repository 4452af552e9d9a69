"""Metrics of KV transfers, registered beside those of the worker."""

from contextlib import suppress
from itertools import product
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter

from services.common.metrics import MetricFactory
from services.transfer.drift import EscapeDrift, Escapes
from services.transfer.policy import LinkView, WireMode


class KvBytes(NamedTuple):
    """Bytes of KV.

    Attributes:
        raw: bytes as in the pages.
        wire: bytes as sent.
        faster_raw: part of ``raw`` that was sent without compression, because the link policy
            measured that this is faster; 0 on the receiving side.
    """

    raw: int
    wire: int
    faster_raw: int = 0


class TransferMetrics:
    """The transfer metrics of one worker process, for both roles.

    Attributes:
        links: metrics of the links to decode workers.
        total: bytes of all segments that were encoded or received since the start.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricFactory(registry)
        self.links = LinkMetrics(make)
        self._escapes = EscapeMetrics(make)
        self._sent_bytes = _byte_counter(make, "kv_sent_bytes", "encoded to send")
        self.sent_tokens = make.counter(
            "kv_sent_tokens",
            "Tokens of sequences whose KV was read completely, including evicted tokens, without "
            "those that the decode worker had.",
        )
        self._bytes = _byte_counter(make, "kv_transfer_bytes", "received")
        self.received_tokens = make.counter(
            "kv_transfer_tokens",
            "Tokens of sequences whose KV arrived completely, including evicted tokens, without "
            "those that this worker had.",
        )
        self.saved_bytes = make.counter(
            "kv_saved_bytes",
            "Bytes of KV, as in the pages, that were not transferred because this worker had them.",
        )
        self._read_seconds = make.seconds("kv_transfer", "Seconds of the READ of one segment.")
        self._ratio = make.gauge(
            "kv_compress_ratio", "Raw bytes over wire bytes since the start of this worker."
        )
        self._encode_seconds = make.seconds("kv_encode", "Seconds to encode one segment.")
        self._decode_seconds = make.seconds(
            "kv_decode", "Seconds to verify and decode one segment."
        )
        self._segments = make.counter(
            "kv_segments", "Segments encoded.", "mode", values=list(WireMode)
        )
        self.slab_slots = make.gauge(
            "kv_slab_slots_in_use", "Slots with encoded KV that is not acknowledged yet."
        )
        self.landing_slots = make.gauge(
            "kv_landing_slots", "Landing slots that are not free, by state.", "state"
        )
        self.leases = make.gauge("kv_lease_active", "Active leases that this worker granted.")
        self.leases_expired = make.counter("kv_lease_expired", "Leases that expired.")
        self.integrity_failures = make.counter(
            "kv_integrity_failures", "Segments that failed verification."
        )
        self.total = KvBytes(0, 0)

    def encoded(
        self,
        mode: WireMode,
        raw_bytes: int,
        wire_bytes: int,
        escapes: Escapes,
        seconds: float,
        *,
        raw_is_faster: bool,
    ) -> None:
        """Record one encoded segment.

        Args:
            raw_is_faster: whether compression of this segment was measured to be slower.
        """
        faster_raw = raw_bytes if raw_is_faster and mode is WireMode.RAW else 0
        self._count(self._sent_bytes, KvBytes(raw_bytes, wire_bytes, faster_raw))
        if mode is WireMode.SPLITZIP:
            self._escapes.add(escapes)
        self._encode_seconds.observe(seconds)
        self._segments.labels(mode).inc()

    def received(self, raw_bytes: int, wire_bytes: int, read_s: float, decode_s: float) -> None:
        """Record one segment that was read, verified and decoded."""
        self._count(self._bytes, KvBytes(raw_bytes, wire_bytes))
        self._read_seconds.observe(read_s)
        self._decode_seconds.observe(decode_s)

    def _count(self, counter: Counter, added: KvBytes) -> None:
        counter.labels("raw").inc(added.raw)
        counter.labels("wire").inc(added.wire)
        self.total = KvBytes(*map(sum, zip(self.total, added, strict=True)))
        self._ratio.set(self.total.raw / self.total.wire)


def _byte_counter(make: MetricFactory, name: str, action: str) -> Counter:
    """Return a counter of raw and wire bytes; ``action`` is what the worker did with them."""
    text = f"Bytes of KV that this worker {action}: raw as in the pages, wire as sent."
    return make.counter(name, text, "kind", values=("raw", "wire"))


class LinkMetrics:
    """Gauges of a prefill worker's links: their speeds and the wire mode chosen for each."""

    def __init__(self, make: MetricFactory) -> None:
        self._wire_mode = make.gauge(
            "kv_wire_mode", "1 for the mode chosen for this link, else 0.", "peer", "mode"
        )
        self._link_speed = make.gauge(
            "kv_link_bytes_per_second", "Wire bytes per second of READs from this worker.", "peer"
        )
        self._encode_speed = make.gauge(
            "kv_encode_bytes_per_second", "KV bytes per second through the encoder.", "mode"
        )
        self._decode_speed = make.gauge(
            "kv_decode_bytes_per_second",
            "KV bytes per second through the decoder of the reader.",
            *("peer", "mode"),
        )

    def observe(self, peer: str, link: LinkView) -> None:
        """Set the gauges of one link to the latest measurements of the link policy."""
        for mode, speed in link.speeds.items():
            self._wire_mode.labels(peer, mode).set(mode is link.choice)
            if speed.encode is not None:
                self._encode_speed.labels(mode).set(speed.encode)
            if speed.decode is not None:
                self._decode_speed.labels(peer, mode).set(speed.decode)
        if link.bytes_per_second is not None:
            self._link_speed.labels(peer).set(link.bytes_per_second)

    def forget(self, peer: str) -> None:
        """Remove the gauges of a peer that has disconnected."""
        with suppress(KeyError):
            self._link_speed.remove(peer)
        for gauge, mode in product((self._wire_mode, self._decode_speed), WireMode):
            with suppress(KeyError):  # the link was never measured
                gauge.remove(peer, mode)


class EscapeMetrics:
    """Gauges of the escape rate of a prefill worker's KV, compared with the calibration."""

    def __init__(self, make: MetricFactory) -> None:
        self._drift = EscapeDrift()
        self._rate = make.gauge(
            "kv_escape_rate", "Share of recently coded values whose exponent has no code."
        )
        self._expected = make.gauge(
            "kv_escape_rate_expected",
            "Share of values without a code in the calibration sample of the codebooks.",
        )
        self._recalibration_advised = make.gauge(
            "kv_recalibration_advised",
            "1 while the escape rate is far above that of the calibration, else 0.",
        )

    def add(self, escapes: Escapes) -> None:
        """Record the escapes of one segment."""
        self._drift.add(escapes.elements, escapes.found, escapes.expected_rate)
        self._rate.set(self._drift.rate)
        self._expected.set(self._drift.expected)
        self._recalibration_advised.set(self._drift.recalibrate)
