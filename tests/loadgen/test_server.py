"""What a server's metrics tell of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from loadgen.errors import UsageError
from loadgen.server import ServerMetrics


class Told:
    """Headrace's metrics, as gateway and workers have them."""

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


def test_stages_and_bytes_are_those_since_the_begin() -> None:
    told, other = Told(), Told()
    told.stage.labels("queue").observe(100.0)
    told.bytes.labels("raw").inc(5.0)
    with served([told.registry]) as url, served([other.registry]) as second:
        metrics = ServerMetrics([url, second], expected=True)
        assert metrics.since() is None
        for seconds in (0.5, 1.5):
            told.stage.labels("queue").observe(seconds)
        told.stage.labels("prefill").observe(0.25)
        other.stage.labels("a part of prefill").observe(0.125)
        told.bytes.labels("raw").inc(100.0)
        other.bytes.labels("raw").inc(300.0)
        other.bytes.labels("wire").inc(200.0)
        assert metrics.since() == {
            "stages": {"queue": 1.0, "prefill": 0.25},
            "kv_bytes": {"raw": 400.0, "wire": 200.0, "ratio": 2.0},
        }


def test_who_is_started_again_counts_from_zero_and_who_is_gone_not_at_all() -> None:
    told, again, gone = Told(), Told(), Told()
    told.bytes.labels("raw").inc(500.0)
    registries = [told.registry]
    with served(registries) as url:
        with served([gone.registry]) as second:
            metrics = ServerMetrics([url, second], expected=True)
        again.bytes.labels("raw").inc(30.0)
        again.bytes.labels("wire").inc(20.0)
        registries[0] = again.registry
        assert metrics.since() == {"kv_bytes": {"raw": 30.0, "wire": 20.0, "ratio": 1.5}}


def test_who_comes_later_is_left_out() -> None:
    """What it had counted before the run cannot be told from what it counted since."""
    told = Told()
    told.bytes.labels("raw").inc(500.0)
    told.bytes.labels("wire").inc(400.0)
    with served([told.registry]) as url:
        urls = ["http://127.0.0.1:9/metrics"]
        metrics = ServerMetrics(urls, expected=False)
        urls[0] = url
        assert metrics.since() is None


def test_a_server_need_not_have_metrics_unless_they_are_named() -> None:
    nowhere = ["http://127.0.0.1:9/metrics"]
    assert ServerMetrics(nowhere, expected=False).since() is None
    with pytest.raises(UsageError, match="has no metrics"):
        ServerMetrics(nowhere, expected=True)
