"""The metrics server: served metrics, and the error for a used port."""

import socket
from urllib.request import urlopen

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from services.common.cluster_token import TokenCheck
from services.common.errors import SettingsError
from services.common.hosts import HostCheck
from services.common.metrics_server import start_metrics_server


def test_exposes_the_registry_on_a_free_port() -> None:
    registry = CollectorRegistry()
    Gauge("headrace_example", "an example", registry=registry).set(3)
    server = start_metrics_server("127.0.0.1", 0, registry)
    try:
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as response:
            assert b"headrace_example 3.0" in response.read()
    finally:
        server.shutdown()
        server.server_close()


def test_foreign_host_is_refused() -> None:
    hosts = HostCheck()
    server = start_metrics_server("127.0.0.1", 0, CollectorRegistry(), hosts=hosts)
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    try:
        for host, status in (("evil.example", 403), ("localhost", 200)):
            response = httpx.get(url, headers={"host": host}, trust_env=False)
            assert response.status_code == status
    finally:
        server.shutdown()
        server.server_close()


def test_requires_the_cluster_token_if_there_is_one() -> None:
    server = start_metrics_server(
        "127.0.0.1", 0, CollectorRegistry(), token_check=TokenCheck("between-us")
    )
    host = f"127.0.0.1:{server.server_port}"

    def status(userinfo: str = "", authorization: str = "") -> int:
        headers = {b"authorization": authorization.encode("latin-1")} if authorization else {}
        url = f"http://{userinfo}{host}/metrics"
        return httpx.get(url, headers=headers, trust_env=False).status_code

    try:
        assert status(authorization="Bearer between-us") == 200
        assert status(userinfo=":between-us@") == 200
        for wrong in (
            "",
            "Bearer wrong",
            "Bearer",
            "between-us",
            "Basic !",
            "Basic YTpi",
            "Bearer \xff",
        ):
            assert status(authorization=wrong) == 401
    finally:
        server.shutdown()
        server.server_close()


def test_port_in_use_is_a_settings_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port} for metrics"):
            start_metrics_server("127.0.0.1", port, CollectorRegistry())
