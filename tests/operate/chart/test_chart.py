"""Helm lints, renders and packages every scenario; Kubernetes' schemas accept the manifests."""

import copy
import re
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.operate.chart.manifests import (
    HELMS,
    KUBERNETES,
    SCENARIOS,
    helm,
    named,
    of_kind,
    pod_templates,
    restricted_violations,
    scenario,
    schema_errors,
)
from tests.operate.chart.tools import CHART, ToolError

pytestmark = pytest.mark.operate

REFUSED = {
    "unknown key": ("replicas=3", "replicas"),
    "unknown key in a section": ("gateway.replica=3", "replica"),
    "unknown pod key": ("workers.nodeSelectors.zone=a", "nodeSelectors"),
    "unknown resource key": ("prefill.resources.limit.cpu=1", "limit"),
    "unknown setting": ("decode.settings.kv_fromat=fp8", "kv_fromat"),
    "setting of another role": ("router.settings.kv_format=fp8", "kv_format"),
    "setting that the chart makes": ("decode.settings.port=9", "port"),
    "setting out of its bounds": ("defaults.settings.drain_s=4000", "drain_s"),
    "setting of a wrong type": ("workers.settings.max_waiting=many", "max_waiting"),
    "setting with an unknown choice": ("workers.settings.codec=zip", "codec"),
    "wrong type of a number": ("gateway.replicas=two", "replicas"),
    "wrong type of a list": ("ingress.hosts=llm.example.com", "hosts"),
    "wrong type of a switch": ("rdma.enabled=sometimes", "enabled"),
    "unknown choice": ("prefill.autoscaling.type=hpa", "type"),
    "KEDA for gateways": ("gateway.autoscaling.type=keda", "type"),
    "no quantity": ("workers.sharedMemory=lots", "sharedMemory"),
    "no digest": ("image.digest=latest", "digest"),
    "no key hash": ("auth.apiKeys.hashes={secret}", "hashes"),
    "unknown volume": ("model.volume.persistentVolumClaim.claimName=m", "persistentVolumClaim"),
    "two volumes": ("model.volume.emptyDir.medium=,model.volume.nfs.path=/m", "volume"),
    "volume and claim": ("model.claim.enabled=true,model.volume.nfs.path=/m", "volume"),
    "ingress without host": ("ingress.enabled=true", "hosts"),
    "route without parent": ("httpRoute.enabled=true", "parentRefs"),
    "pool without picker": ("inferencePool.enabled=true", "endpointPicker"),
    "TLS without certificate": ("tls.enabled=true", "tls"),
    "environment of another library": ("transfer.environment.LD_PRELOAD=x", "LD_PRELOAD"),
    "download to a shared volume": (
        "model.fetch.repository=a/b,model.volume.nfs.server=s,model.volume.nfs.path=/m",
        "model.volume",
    ),
    "setting made by the preparation": (
        "model.claim.enabled=true,model.prepare.codebooks=true,workers.settings.codebooks=/c",
        "codebooks",
    ),
    "strategy of a StatefulSet": ("router.strategy.type=Recreate", "strategy"),
    "loopback address": ("host=127.0.0.1", "host"),
    "preparation without claim": ("model.prepare.codebooks=true", "model.claim.enabled"),
}
"""Values that Helm must refuse, and what its message names."""


@pytest.mark.parametrize("version", HELMS)
def test_helm_has_the_version(version: str) -> None:
    assert helm(version).run("version", "--short").stdout.startswith(f"v{version}.")


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("version", HELMS)
def test_scenario_is_linted_without_warnings(version: str, name: str) -> None:
    done = helm(version).run("lint", ".", "--strict", "--values", f"ci/{name}-values.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_versions_of_helm_render_the_same(name: str) -> None:
    token = ("--set", "auth.clusterToken.value=token")
    old, new = (scenario(name, *token, version=version) for version in HELMS)
    assert sorted(old, key=str) == sorted(new, key=str)


@pytest.mark.parametrize("version", HELMS)
def test_package_renders_like_the_folder(version: str, tmp_path: Path) -> None:
    done = helm(version).run("package", str(CHART), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("headrace-*.tgz")
    with tarfile.open(package) as archive:
        assert not [name for name in archive.getnames() if "/ci/" in name]
    values = (
        *("--values", str(CHART / "ci/autoscaled-production-values.yaml")),
        *("--set", "auth.clusterToken.value=token"),
    )
    assert helm(version).render(*values, chart=str(package)) == helm(version).render(*values)


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("version", HELMS)
def test_wrong_values_are_refused(version: str, why: str) -> None:
    values, named_in_message = REFUSED[why]
    with pytest.raises(ToolError) as refused:
        helm(version).render("--set", values)
    assert re.search(r"schema|model\.(prepare|fetch) ", str(refused.value))
    assert re.search(rf"\b{named_in_message}\b", str(refused.value))


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_manifests_pass_strict_validation(name: str, version: str) -> None:
    assert schema_errors(scenario(name), version) == []


def test_strict_validation_finds_errors() -> None:
    manifests = copy.deepcopy(scenario("autoscaled-production"))
    named(manifests, "Deployment", "r-headrace-decode")["spec"]["template"]["spec"]["tolerate"] = []
    named(manifests, "Service", "r-headrace-gateway")["spec"]["ports"][0]["port"] = "http"
    named(manifests, "InferencePool", "r-headrace-gateway")["spec"]["targetPort"] = 8000
    (monitor,) = of_kind(manifests, "PodMonitor")
    monitor["spec"]["podMetricsEndpoints"][0] |= {"intervall": "15s", "interval": 15}
    named(manifests, "HTTPRoute", "r-headrace-gateway")["spec"]["rules"][0]["timeout"] = {}
    errors = "\n".join(schema_errors(manifests, "1.35"))
    assert errors.count("\n") == 5
    for part in (
        "tolerate",
        "'http' is not",
        "targetPort",
        "intervall",
        "interval must",
        "timeout",
    ):
        assert part in errors


@pytest.mark.parametrize("name", SCENARIOS)
def test_pods_keep_the_restricted_standard(name: str) -> None:
    violations = {
        component: restricted_violations(pod) for component, pod in pod_templates(scenario(name))
    }
    expected: dict[str, list[str]] = {component: [] for component in violations}
    if name == "one-gpu-node":  # a model on the node's disk
        for role in ("gateway", "prefill", "decode"):
            expected[role] = ["volume models: hostPath"]
    if name == "two-node-rdma":  # capabilities act for root only
        for role in ("prefill", "decode"):
            rules = [
                f"{box}: {rule}"
                for box in ("model", role)
                for rule in ("runAsNonRoot", "runAsUser")
            ]
            expected[role] = [*rules, f"{role}: add"]
    assert violations == expected


def test_rules_and_dashboards_are_complete() -> None:
    manifests = scenario("autoscaled-production")
    (rule,) = of_kind(manifests, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files/rules.yaml").read_text())
    boards = {
        name: text
        for manifest in of_kind(manifests, "ConfigMap")
        for name, text in manifest["data"].items()
    }
    assert boards == {
        file.name: file.read_text() for file in (CHART / "files/dashboards").glob("*.json")
    }
