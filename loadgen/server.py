"""What the target's own metrics say of a run: how they grew from its begin to its end.

Headrace's are known: how long requests spent in each stage, and KV before and after compression. A
server that has none of them is told nothing of.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadgen.errors import UsageError

_STAGE, _KV = "headrace_request_stage_seconds", "headrace_kv_transfer_bytes_total"
_TIMEOUT_S = 10.0
Counters = dict[tuple[str, str], float]
"""By name of a sample, and the label that tells a stage or a kind."""


class ServerMetrics:
    """``urls`` of metrics; of ``expected`` ones it is an error not to answer before the run. One
    that does not answer, before or after it, is left out: what was measured is not lost for it.

    Stages are those that the first one tells: Headrace's workers count parts of what its gateway
    has. Bytes are added up over all.
    """

    def __init__(self, urls: Sequence[str], *, expected: bool) -> None:
        self._urls = urls
        self._before = [self._read(number, expected) for number in range(len(urls))]

    def since(self) -> dict[str, Any] | None:
        """``stages``, mean seconds of a request, and ``kv_bytes``; None: nothing was told."""
        grown: Counters = defaultdict(float)
        for number, before in enumerate(self._before):
            after = self._read(number, expected=False)
            if before is None or after is None:
                continue
            again = any(value < before.get(key, 0.0) for key, value in after.items())
            for key, value in after.items():  # who was started again counts from 0
                grown[key] += value if again else value - before.get(key, 0.0)
        found: dict[str, Any] = {}
        if stages := _stages(grown):
            found["stages"] = stages
        raw, wire = (grown.get((_KV, kind), 0.0) for kind in ("raw", "wire"))
        if raw > 0 and wire > 0:
            found["kv_bytes"] = {"raw": raw, "wire": wire, "ratio": raw / wire}
        return found or None

    def _read(self, number: int, expected: bool) -> Counters | None:
        counters: Counters = defaultdict(float)
        url = self._urls[number]
        try:
            answer = httpx.get(url, timeout=_TIMEOUT_S)
            answer.raise_for_status()
            _add(counters, answer.text, (_KV,) if number else (_STAGE, _KV))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            if expected:
                raise UsageError(f"{url} has no metrics: {error}") from error
            return None
        return counters


def _add(counters: Counters, text: str, names: tuple[str, ...]) -> None:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(names) and "le" not in sample.labels:
                labels = sample.labels
                key = (sample.name, labels.get("stage") or labels.get("kind", ""))
                counters[key] += sample.value


def _stages(grown: Mapping[tuple[str, str], float]) -> dict[str, float]:
    counts = {stage: n for (name, stage), n in grown.items() if name == f"{_STAGE}_count" and n > 0}
    return {stage: grown[f"{_STAGE}_sum", stage] / count for stage, count in counts.items()}
