"""Listening addresses with KV transfers over TCP; `test_serving` tests shared memory."""

import httpx
import pytest

from tests.harness.deployment import deployed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_tcp_transfers_listen_on_the_loopback_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE"):
        monkeypatch.delenv(variable, raising=False)
    environment = {
        "UCX_TLS": "tcp,self",
        "HEADRACE_PREFILL_LOG_FORMAT": "json",
        "HEADRACE_DECODE_LOG_FORMAT": "json",
    }
    with deployed("--host", "127.0.0.1", "--codec", "raw", environment=environment) as running:
        body = {"model": running.model, "prompt": "The quick brown fox. " * 20, "max_tokens": 4}
        url = f"{running.url}/v1/completions"
        httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()
        assert running.metric("decode-0", "headrace_kv_transfer_bytes_total", kind="wire") > 0
        running.check_listeners()
