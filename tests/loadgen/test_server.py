"""Server metrics of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from loadgen.errors import UsageError
from loadgen.server import ServerMetrics


class Metrics:
    """Headrace's metrics, as exported by gateway and workers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.stage = Histogram(
            "headrace_request_stage_seconds", "", ["stage"], registry=registry, buckets=(1, 2)
        )
        self.bytes = Counter("headrace_kv_transfer_bytes", "", ["kind"], registry=registry)


@contextmanager
def served(registries: list[CollectorRegistry]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(generate_latest(registries[0]))

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def test_stages_and_bytes_are_counted_from_the_start_of_the_run() -> None:
    gateway, other = Metrics(), Metrics()
    gateway.stage.labels("queue").observe(100.0)
    gateway.bytes.labels("raw").inc(5.0)
    with served([gateway.registry]) as url, served([other.registry]) as second:
        metrics = ServerMetrics([url, second], required=True)
        assert metrics.collect() is None
        gateway.stage.labels("queue").observe(0.5)
        other.stage.labels("queue").observe(1.5)
        gateway.stage.labels("prefill").observe(0.25)
        gateway.bytes.labels("raw").inc(100.0)
        other.bytes.labels("raw").inc(300.0)
        other.bytes.labels("wire").inc(200.0)
        assert metrics.collect() == {
            "stages": {"queue": 1.0, "prefill": 0.25},
            "kv_bytes": {"raw": 400.0, "wire": 200.0, "ratio": 2.0},
        }


def test_restarted_server_counts_from_zero_and_missing_server_is_left_out() -> None:
    gateway, again, gone = Metrics(), Metrics(), Metrics()
    gateway.bytes.labels("raw").inc(500.0)
    registries = [gateway.registry]
    with served(registries) as url:
        with served([gone.registry]) as second:
            metrics = ServerMetrics([url, second], required=True)
        again.bytes.labels("raw").inc(30.0)
        again.bytes.labels("wire").inc(20.0)
        registries[0] = again.registry
        assert metrics.collect() == {"kv_bytes": {"raw": 30.0, "wire": 20.0, "ratio": 1.5}}


def test_server_without_metrics_before_the_run_is_left_out() -> None:
    """Without the counters at the start, their growth during the run is unknown."""
    gateway = Metrics()
    gateway.bytes.labels("raw").inc(500.0)
    gateway.bytes.labels("wire").inc(400.0)
    with served([gateway.registry]) as url:
        urls = ["http://127.0.0.1:9/metrics"]
        metrics = ServerMetrics(urls, required=False)
        urls[0] = url
        assert metrics.collect() is None


def test_metrics_are_required_only_if_given() -> None:
    closed = ["http://127.0.0.1:9/metrics"]
    assert ServerMetrics(closed, required=False).collect() is None
    with pytest.raises(UsageError, match="no metrics at"):
        ServerMetrics(closed, required=True)
