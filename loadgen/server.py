"""Server metrics: growth of Prometheus counters from the start to the end of a run.

The counters are Headrace's: seconds spent in each request stage, and KV bytes before and after
compression. The summary omits server metrics if the server has no such counters.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadgen.errors import UsageError
from loadgen.http_client import http_client

_STAGE, _KV = "headrace_request_stage_seconds", "headrace_kv_transfer_bytes_total"
_TIMEOUT_S = 10.0
Counters = dict[tuple[str, str], float]
"""Counter values by (sample name, value of the label ``stage`` or ``kind``)."""


class ServerMetrics:
    """Reads metrics when created and again after the run.

    A URL that does not answer, before or after the run, is left out. Counters are summed over all
    URLs: gateways export the stages, and decode workers the bytes.

    Args:
        urls: URLs of Prometheus metrics.
        required: whether a URL that does not answer before the run is an error.

    Raises:
        UsageError: if a required URL does not answer.
    """

    def __init__(self, urls: Sequence[str], *, required: bool) -> None:
        self._urls = urls
        self._before = [self._read(number, required) for number in range(len(urls))]

    def collect(self) -> dict[str, Any] | None:
        """Return the growth of the counters during the run, or None if there are no counters.

        The keys are ``stages``, the mean seconds per request in each stage, and ``kv_bytes``, the
        bytes before and after compression and their ratio.
        """
        grown: Counters = defaultdict(float)
        for number, before in enumerate(self._before):
            after = self._read(number, required=False)
            if before is None or after is None:
                continue
            restarted = any(value < before.get(key, 0.0) for key, value in after.items())
            for key, value in after.items():  # counters of a restarted process begin at 0
                grown[key] += value if restarted else value - before.get(key, 0.0)
        found: dict[str, Any] = {}
        if stages := _stages(grown):
            found["stages"] = stages
        raw, wire = (grown.get((_KV, kind), 0.0) for kind in ("raw", "wire"))
        if raw > 0 and wire > 0:
            found["kv_bytes"] = {"raw": raw, "wire": wire, "ratio": raw / wire}
        return found or None

    def _read(self, number: int, required: bool) -> Counters | None:
        counters: Counters = defaultdict(float)
        url = self._urls[number]
        try:
            with http_client(timeout_s=_TIMEOUT_S) as client:
                answer = client.get(url).raise_for_status()
            _add(counters, answer.text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            if required:
                raise UsageError(f"no metrics at {url}: {error}") from error
            return None
        return counters


def _add(counters: Counters, text: str) -> None:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith((_STAGE, _KV)) and "le" not in sample.labels:
                labels = sample.labels
                key = (sample.name, labels.get("stage") or labels.get("kind", ""))
                counters[key] += sample.value


def _stages(grown: Mapping[tuple[str, str], float]) -> dict[str, float]:
    counts = {stage: n for (name, stage), n in grown.items() if name == f"{_STAGE}_count" and n > 0}
    return {stage: grown[f"{_STAGE}_sum", stage] / count for stage, count in counts.items()}
