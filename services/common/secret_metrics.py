"""Prometheus metrics of a process about its files with secrets and its cluster token."""

from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry

from services.common.cluster_token import TokenCheck
from services.common.metrics import MetricFactory
from services.common.secret_files import SecretFiles


class SecretMetrics:
    """Metrics of a process about its secrets, the same for all services."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricFactory(registry)
        self._failed = make.gauge(
            "secret_files_failed",
            "1 while the content of files is not valid and the previous one is used, else 0.",
            "kind",
        )
        self._loaded = make.gauge(
            "secret_files_loaded_timestamp_seconds",
            "Time at which the used content of files was read, seconds since 1970.",
            "kind",
        )
        self._expiry = make.gauge(
            "secret_files_expiry_timestamp_seconds",
            "Time at which the used content of files expires, seconds since 1970.",
            "kind",
        )
        self._second_calls = make.counter(
            "second_cluster_token_calls", "Calls accepted with the second cluster token."
        )

    def observe(self, files: Sequence[SecretFiles], check: TokenCheck | None) -> None:
        """Export metrics of these files and of calls with the second cluster token from now on."""
        for each in files:
            self._failed.labels(each.kind).set_function(partial(_has_failed, each))
            self._loaded.labels(each.kind).set_function(partial(getattr, each, "loaded_at"))
            if each.expires_at is not None:
                self._expiry.labels(each.kind).set_function(partial(getattr, each, "expires_at"))
        if check is not None:
            check.on_second = self._second_calls.inc


def _has_failed(files: SecretFiles) -> bool:
    return files.failure is not None
