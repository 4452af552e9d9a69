"""Prometheus metrics of a deployment's processes before and after a measurement."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

_PREFIX, _TIMEOUT_S = "headrace_", 10.0
_COUNTERS = ("counter", "histogram")
_BUCKET = " le="
"""Separates a series of a histogram from the upper bound of a bucket."""

Samples = dict[str, float]
"""Values by sample, such as ``headrace_kv_segments_total{mode="raw"}``."""


class MetricsReader:
    """Reads metrics when created and again with `collect`.

    Args:
        urls: URLs of Prometheus metrics, by process name.
    """

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls
        self._before = {name: _read(url)[0] for name, url in urls.items()}
        self._after: dict[str, Samples] = {}

    def collect(self) -> dict[str, Samples]:
        """Return the growth of each counter and the value of each gauge, by process name.

        Buckets of histograms are left out, and so are counters that did not change.
        """
        found = {}
        for name, url in self._urls.items():
            counters, gauges = _read(url)
            before = self._before[name]
            self._after[name] = counters
            counters = {key: value for key, value in counters.items() if _BUCKET not in key}
            grown = {key: value - before.get(key, 0.0) for key, value in counters.items()}
            found[name] = {key: value for key, value in grown.items() if value} | gauges
        return found

    def quantiles(self, quantile: float) -> dict[str, float]:
        """Return a quantile of each histogram that has grown, by process and sample.

        As Prometheus does, it is interpolated within its bucket. Call `collect` first.
        """
        found = {}
        for name, counters in self._after.items():
            before = self._before[name]
            buckets: dict[str, list[tuple[float, float]]] = {}
            for key, value in counters.items():
                if _BUCKET in key:
                    series, _, bound = key.rpartition(_BUCKET)
                    grown = value - before.get(key, 0.0)
                    buckets.setdefault(series, []).append((float(bound), grown))
            for series, counts in buckets.items():
                if counts[-1][1] > 0:
                    found[f"{name} {series}"] = histogram_quantile(counts, quantile)
        return found


def histogram_quantile(buckets: Sequence[tuple[float, float]], quantile: float) -> float:
    """Return a quantile of a histogram, interpolated linearly within its bucket.

    Args:
        buckets: upper bound and cumulative count, in rising order; the last bound is infinite.
    """
    rank = quantile * buckets[-1][1]
    low = 0.0
    below = 0.0
    for high, count in buckets:
        if count >= rank and count > below:
            if high == math.inf:
                break
            return low + (high - low) * (rank - below) / (count - below)
        low, below = high, count
    return low


def _read(url: str) -> tuple[Samples, Samples]:
    """Return counters and gauges of a process; both are empty if it does not answer."""
    counters: Samples = {}
    gauges: Samples = {}
    try:
        text = httpx.get(url, timeout=_TIMEOUT_S, trust_env=False).raise_for_status().text
    except httpx.HTTPError:
        return counters, gauges
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(_PREFIX) or sample.name.endswith("_created"):
                continue
            into = counters if family.type in _COUNTERS else gauges
            labels = dict(sample.labels)
            bound = labels.pop("le", None)
            key = _key(sample.name.removesuffix("_bucket"), labels)
            into[key if bound is None else f"{key}{_BUCKET}{bound}"] = sample.value
    return counters, gauges


def _key(name: str, labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name


def total(metrics: Mapping[str, Samples], name: str, role: str = "", **labels: str) -> float:
    """Return the sum of a metric over the processes of a role and all labels that are not given.

    Args:
        metrics: result of `MetricsReader.collect`.
        role: start of the process names, such as ``prefill``.
    """
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for process, samples in metrics.items()
        if process.startswith(role)
        for key, value in samples.items()
        if key.partition("{")[0] == name and all(one in key for one in wanted)
    )


def mean(metrics: Mapping[str, Samples], name: str, role: str = "", **labels: str) -> float | None:
    """Return the mean of a histogram's observations, or None without any."""
    count = total(metrics, f"{name}_count", role, **labels)
    return total(metrics, f"{name}_sum", role, **labels) / count if count else None


def stages(metrics: Mapping[str, Samples]) -> dict[str, Any]:
    """Return the mean seconds of a request in each stage, and figures of the KV transfer.

    Figures of the transfer are present only if KV moved: bytes of KV and bytes sent, segments by
    wire mode, and the mean seconds of one segment in the encoder, the READ and the decoder.
    """
    stage = "headrace_request_stage_seconds"
    names = ("route", "queue", "prefill", "transfer", "verify", "decode")
    found: dict[str, Any] = {
        name: value for name in names if (value := mean(metrics, stage, "gateway", stage=name))
    }
    raw = total(metrics, "headrace_kv_transfer_bytes_total", "decode", kind="raw")
    if raw:
        found |= {
            "kv_bytes": raw,
            "wire_bytes": total(metrics, "headrace_kv_transfer_bytes_total", "decode", kind="wire"),
            "segments": {
                mode: count
                for mode in ("raw", "splitzip")
                if (count := total(metrics, "headrace_kv_segments_total", "prefill", mode=mode))
            },
            "encode": mean(metrics, "headrace_kv_encode_seconds", "prefill"),
            "read": mean(metrics, "headrace_kv_transfer_seconds", "decode"),
            "decode_kv": mean(metrics, "headrace_kv_decode_seconds", "decode"),
        }
    return found
