"""Metrics of all services can be summed over a deployment."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from services.common.encoder_placement import EncoderList
from services.common.metrics import service_registry
from services.common.secret_metrics import SecretMetrics
from services.encoder.metrics import EncoderMetrics
from services.gateway.metrics import GatewayMetrics
from services.prefill.metrics import HistoryMetrics
from services.router.metrics import RouterMetrics
from services.transfer.metrics import TransferMetrics
from services.worker.metrics import WorkerMetrics


def worker_registry() -> CollectorRegistry:
    metrics = WorkerMetrics()
    TransferMetrics(metrics.registry)
    HistoryMetrics(metrics.registry)
    return metrics.registry


def encoder_registry() -> CollectorRegistry:
    return EncoderMetrics().registry


def router_registry() -> CollectorRegistry:
    metrics = RouterMetrics()
    metrics.render([], 0, EncoderList(workers=[], models=[]))
    return metrics.registry


SERVICES = {
    "gateway": lambda: GatewayMetrics().registry,
    "router": router_registry,
    "worker": worker_registry,
    "encoder": encoder_registry,
}
OF_ALL_WORKERS = {"headrace_worker_ready", "headrace_queue_tokens"}
"""Metrics that prefill, decode and encoder workers have."""


def own_metrics(service: str) -> list[Metric]:
    """Return the metrics of a service that are not those of every process."""
    collected = SERVICES[service]().collect()
    registry = service_registry(caches=True)
    SecretMetrics(registry)
    shared = {metric.name for metric in registry.collect()}
    return [metric for metric in collected if metric.name not in shared]


def test_no_name_belongs_to_two_services() -> None:
    owners = Counter(metric.name for service in SERVICES for metric in own_metrics(service))
    assert {name for name, count in owners.items() if count > 1} == OF_ALL_WORKERS


@pytest.mark.parametrize("service", SERVICES)
def test_metrics_have_the_prefix_and_a_sentence_of_help(service: str) -> None:
    found = own_metrics(service)
    assert len(found) > 5
    for metric in found:
        assert metric.name.startswith("headrace_")
        text = metric.documentation
        assert text.endswith("."), text
        assert text[0].isupper() or text[0] == "1", text


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_reports_its_version_its_process_and_its_secrets(service: str) -> None:
    names = {metric.name for metric in SERVICES[service]().collect()}
    assert {"headrace_build_info", "process_start_time_seconds"} <= names
    assert {"headrace_write_failures", "headrace_disk_free_bytes"} <= names
    assert {"headrace_secret_files_failed", "headrace_second_cluster_token_calls"} <= names


@pytest.mark.parametrize(
    ("service", "name", "labels"),
    [
        ("gateway", "headrace_failovers_total", {"reason": "worker_lost"}),
        ("gateway", "headrace_failovers_total", {"reason": "integrity"}),
        ("gateway", "headrace_request_stage_seconds_count", {"stage": "route"}),
        ("gateway", "headrace_request_stage_seconds_count", {"stage": "transfer"}),
        ("gateway", "headrace_grammars_compiled_total", {"kind": "json_schema"}),
        ("gateway", "headrace_grammars_refused_total", {"reason": "timeout"}),
        ("router", "headrace_router_placements_total", {"outcome": "queue_full"}),
        ("router", "headrace_router_workers", {"role": "decode", "state": "ready"}),
        ("router", "headrace_router_encode_placements_total", {"outcome": "queue_full"}),
        ("encoder", "headrace_encoder_calls_total", {"result": "overloaded"}),
        ("worker", "headrace_kv_sent_bytes_total", {"kind": "wire"}),
        ("worker", "headrace_kv_segments_total", {"mode": "splitzip"}),
        ("worker", "headrace_kv_history_failures_total", {"reason": "not_cached"}),
    ],
)
def test_series_exist_before_their_first_event(
    service: str, name: str, labels: dict[str, str]
) -> None:
    """A rate is computed from two samples, and an alert needs series to compare."""
    assert SERVICES[service]().get_sample_value(name, labels) == 0
