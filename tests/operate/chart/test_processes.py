"""Services run with the arguments and environment of rendered pods, and drain in the grace period.

Only hosts, ports and mount paths change, see `local_pod`.
"""

import base64
import hashlib
import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.common.model_source import resolve_model
from tests.operate.chart.local_pod import Cluster, LocalPod, request
from tests.operate.chart.manifests import (
    Manifest,
    containers,
    of_kind,
    pod_of,
    scenario,
)
from tests.ports import free_ports
from tests.services.certificates import Authority

pytestmark = [pytest.mark.operate, pytest.mark.timeout(900)]

API_KEY = "test-key"
SERVER_NAME = "r-headrace.serving.svc"


@contextmanager
def running(
    cluster: Cluster, manifests: list[Manifest], routers: int = 1
) -> Iterator[dict[str, LocalPod]]:
    """Run all routers and one pod of each other role. They are ready when the block begins."""
    pods = {
        f"r-headrace-router-{number}": LocalPod(
            cluster, pod_of(manifests, "router"), f"r-headrace-router-{number}"
        )
        for number in range(routers)
    }
    cluster.routers.update({name: pod.port("http") for name, pod in pods.items()})
    for role in ("gateway", "prefill", "decode"):
        pods[role] = LocalPod(cluster, pod_of(manifests, role), f"r-headrace-{role}-abc")
    try:
        for pod in pods.values():
            pod.start()
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for pod in pods.values():
                pod.wait_for(probe)
        yield pods
    finally:
        for pod in pods.values():
            pod.kill()


def secrets_of(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    """Return the data of the Secrets that the chart makes."""
    found = {}
    for manifest in of_kind(manifests, "Secret"):
        data = {k: base64.b64decode(v).decode() for k, v in manifest.get("data", {}).items()}
        found[manifest["metadata"]["name"]] = data | manifest.get("stringData", {})
    return found


def run_helm_test(manifests: list[Manifest], gateway: LocalPod, cluster: Cluster) -> str:
    """Run the container of `helm test`, and return the text of its completion."""
    (container,) = containers(pod_of(manifests, "test"))
    environment = {
        "PATH": "/usr/bin:/bin",
        "WAIT_S": "120",
        "URL": f"http://127.0.0.1:{gateway.port('http')}",
    }
    for entry in container["env"]:
        if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
            environment[entry["name"]] = cluster.secrets[reference["name"]][reference["key"]]
    command: list[str] = container["command"] + container["args"]
    assert command[0] == "python"
    done = subprocess.run(
        [sys.executable, *command[1:]],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr + gateway.log.read_text()[-2000:]
    return str(json.loads(done.stdout)["choices"][0]["text"])


class Stream:
    """A streamed completion, read by a thread."""

    def __init__(self, gateway: LocalPod, tokens: int, key: str | None = None) -> None:
        self.chunks: list[str] = []
        self.started = threading.Event()
        self._url = f"http://127.0.0.1:{gateway.port('http')}/v1"
        self._tokens = tokens
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with httpx.Client(timeout=120, trust_env=False, headers=self._headers) as client:
            model = client.get(f"{self._url}/models").json()["data"][0]["id"]
            body = {
                "model": model,
                "prompt": "Once upon a time",
                "max_tokens": self._tokens,
                "temperature": 0,
                "stream": True,
                "logit_bias": {"0": -100, "2": -100},  # no end of text
            }
            with client.stream("POST", f"{self._url}/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.chunks.append(line.removeprefix("data: "))
                        self.started.set()

    def finish(self, limit_s: float) -> str | None:
        """Return the finish reason, once the stream has ended."""
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), "the stream has not ended"
        assert self.chunks[-1] == "[DONE]", self.chunks[-3:]
        reasons = [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in self.chunks[:-1]]
        return next((reason for reason in reversed(reasons) if reason), None)


def check_drains(pods: dict[str, LocalPod], key: str | None = None) -> None:
    """End all pods one after another. A decode worker and a gateway first finish a request."""
    decode, gateway = pods["decode"], pods["gateway"]
    for ending in (decode, gateway):
        stream = Stream(gateway, 300, key)
        assert stream.started.wait(60), gateway.log.read_text()[-3000:]
        ending.terminate()
        wait_until_not_ready(ending)
        assert "[DONE]" not in stream.chunks  # the request still runs
        assert ending.probe("livenessProbe")[0] == 200
        assert stream.finish(ending.spec["terminationGracePeriodSeconds"]) == "length"
        assert ending.wait() == 0, ending.log.read_text()[-3000:]
        if ending is decode:
            decode.start()
            decode.wait_for("readinessProbe")
            gateway.wait_for("readinessProbe")
    for name in sorted(pods.keys() - {"gateway"}):
        began = time.monotonic()
        pods[name].terminate()
        assert pods[name].wait() == 0, pods[name].log.read_text()[-3000:]
        limit_s = pods[name].spec["terminationGracePeriodSeconds"] - 20
        assert time.monotonic() - began < limit_s  # idle: nothing to wait for


def wait_until_not_ready(pod: LocalPod) -> None:
    deadline = time.monotonic() + 25
    while pod.probe("readinessProbe")[0] in (0, 200):  # 0: no answer in time
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_metrics(
    manifests: list[Manifest], pods: dict[str, LocalPod], cluster: Cluster, tls: Authority | None
) -> None:
    """Scrape the pods as the PodMonitor does; with TLS, they refuse other requests."""
    scraped = set()
    (monitor,) = of_kind(manifests, "PodMonitor")
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        keep = next(r for r in endpoint["relabelings"] if r.get("action") == "keep")
        secret = endpoint["authorization"]["credentials"]
        token = cluster.secrets[secret["name"]][secret["key"]]
        context = None
        if endpoint.get("scheme") == "https":
            assert tls is not None
            files = cluster.secret_folder(endpoint["tlsConfig"]["ca"]["secret"]["name"])
            loaded = ssl.create_default_context(cafile=str(files / "ca.crt"))
            loaded.load_cert_chain(files / "tls.crt", files / "tls.key")
            context = (loaded, endpoint["tlsConfig"]["serverName"])
        for name, pod in pods.items():
            role = "router" if "router" in name else name
            if not re.fullmatch(keep["regex"], role):
                continue
            port = pod.port(endpoint["port"])
            headers = {"authorization": f"Bearer {token}"}
            status, text = request(port, "/metrics", headers=headers, tls=context)
            assert status == 200, (name, text)
            if role in ("prefill", "decode"):
                assert scaling_metrics() <= set(re.findall(r"^headrace_\w+", text, re.MULTILINE))
            scraped.add(name)
            if context is not None:
                assert request(port, "/metrics", headers=headers)[0] != 200
                assert request(port, "/metrics", tls=context)[0] == 401
    assert scraped == pods.keys()


def test_minimal_scenario_serves_and_drains(tmp_path: Path) -> None:
    manifests = scenario(
        "minimal-cpu", "--set", "auth.clusterToken.value=secret,monitoring.podMonitor.enabled=true"
    )
    cluster = Cluster(tmp_path, secrets_of(manifests), tmp_path, transfer_ports())
    with running(cluster, manifests) as pods:
        assert run_helm_test(manifests, pods["gateway"], cluster)
        for pod in pods.values():
            assert json.loads(pod.wait_for("readinessProbe")) == {"status": "ready"}
        check_metrics(manifests, pods, cluster, None)
        for pod in pods.values():
            assert pod.memory() < 0.8 * pod.memory_limit()
        for name in ("prefill", "decode"):
            assert request(pods[name].port("metrics"), "/metrics")[0] == 401
        check_drains(pods)


def test_production_scenario_with_mutual_tls_and_two_routers(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "SmolLM2.gguf").symlink_to(resolve_model("smollm2-135m"))
    manifests = scenario(
        "autoscaled-production",
        *("--set", "model.path=SmolLM2.gguf,tracing.endpoint="),
        *("--set-string", "workers.resources.limits.cpu=1"),
    )
    authority = Authority(tmp_path / "authority")
    files = authority.issue("services", host=SERVER_NAME)
    digest = hashlib.sha256(API_KEY.encode()).hexdigest()
    secrets = {
        "headrace-cluster-token": {"token": "secret"},
        "headrace-api-keys": {"api-keys": f"{digest} web weight=2\n"},
        "headrace-test-key": {"key": API_KEY},
        "r-headrace-tls": {
            "tls.crt": files.certificate.read_text(),
            "tls.key": files.key.read_text(),
            "ca.crt": files.ca.read_text(),
        },
    }
    cluster = Cluster(tmp_path, secrets, models, transfer_ports())
    with running(cluster, manifests, routers=2) as pods:
        assert run_helm_test(manifests, pods["gateway"], cluster)
        assert request(pods["gateway"].port("http"), "/v1/models")[0] == 401
        check_metrics(manifests, pods, cluster, authority)
        check_drains(pods, API_KEY)


def scaling_metrics() -> set[str]:
    """Return the names of the metrics by which KEDA scales workers."""
    scalers = of_kind(scenario("autoscaled-production"), "ScaledObject")
    queries = [trigger["metadata"]["query"] for s in scalers for trigger in s["spec"]["triggers"]]
    return {name for query in queries for name in re.findall(r"headrace_\w+", query)}


def transfer_ports() -> str:
    """Return a range of ports for the transfers of two workers."""
    first, *_, last = free_ports(65)
    return f"{first}-{last}"
