"""A deployment whose services use mutual TLS, before and after all of its certificates change."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.harness.deployment import Running, deployed
from tests.harness.random_model import RandomModel
from tests.services.certificates import Authority
from tests.services.tls_ports import client_context, is_refused, request

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


def complete(running: Running) -> str:
    body = {
        "model": running.model,
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60, trust_env=False)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def ports(running: Running) -> dict[tuple[str, int], str]:
    """Return the kind of each port on which services call one another or are scraped."""
    found = {("router", running.state.router_port): "router"}
    for name in ("prefill-0", "decode-0"):
        ready = running.records(name, "ready")[-1]
        found |= {(name, int(str(ready["port"]))): "worker"}
        found |= {(name, int(str(ready["metrics_port"]))): "metrics"}
    return found


async def check_ports(running: Running, accepted: Authority, refused: Authority) -> None:
    """Check that every port accepts only certificates of one of the authorities."""
    for (name, port), kind in ports(running).items():
        assert (await request(port, kind, client_context(accepted, accepted)))[1], (name, kind)
        for context in (
            None,
            client_context(accepted),
            client_context(accepted, refused),
            client_context(accepted, accepted, expired=True),
        ):
            assert await is_refused(port, kind, context), (name, kind)


def test_deployment_with_mutual_tls_answers_before_and_after_its_certificates_change(
    tmp_path: Path,
) -> None:
    """A worker restarts with the new CA, and the others use it without a restart."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    folder = old.issue("services").ca.parent
    model = str(RandomModel("tiny").ensure())
    with deployed("--tls-dir", str(folder), "--model", model) as running:
        expected = complete(running)
        asyncio.run(check_ports(running, old, refused=new))
        new.issue("services", into=old)
        epoch = running.workers()["decode-0"]["epoch"]
        os.kill(running.state.pids["decode-0"], signal.SIGKILL)
        running.wait_for_new_epoch("decode-0", epoch)
        assert complete(running) == expected
        asyncio.run(check_ports(running, new, refused=old))
        assert running.records("decode-0", "prefill session opened")
