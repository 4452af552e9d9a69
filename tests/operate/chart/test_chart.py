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
    "no gateway": ("gateway.replicas=0", "replicas"),
    "no decode worker": ("decode.replicas=0", "decode.replicas"),
    "no prefill worker": ("prefill.replicas=0", "prefill.replicas"),
    "no decode worker in one set": (
        "blueGreen.sets={blue,green},blueGreen.green.decode.replicas=0",
        "blueGreen.green.decode.replicas",
    ),
    "minimum above maximum": ("gateway.autoscaling.minReplicas=9", "minReplicas"),
    "minimum above maximum for KEDA": (
        "decode.autoscaling.type=keda,decode.autoscaling.maxReplicas=2,decode.autoscaling.minReplicas=3",
        "minReplicas",
    ),
    "autoscaling by the CPU without request": (
        "gateway.autoscaling.type=cpu,gateway.resources.requests=null",
        "gateway.resources.requests.cpu",
    ),
    "two GPUs for a worker of one rank": (
        "workers.image.flavor=cuda,decode.resources.limits.nvidia\\.com/gpu=2",
        "decode.resources: 2 GPUs, but settings.tp is 1",
    ),
    "one GPU for a worker of two ranks": (
        "workers.image.flavor=cuda,workers.resources.limits.nvidia\\.com/gpu=1,"
        "prefill.settings.tp=2",
        "prefill.resources: 1 GPUs, but settings.tp is 2",
    ),
    "MIG instances for a worker of two ranks": (
        "workers.image.flavor=cuda,decode.resources.limits.nvidia\\.com/mig-3g\\.40gb=2,"
        "decode.settings.tp=2",
        "decode.resources: nvidia.com/mig-3g.40gb",
    ),
    "fewer transfer ports than ranks": (
        "decode.settings.tp=4,transfer.ports=21000-21002",
        "transfer.ports: 21000-21002 has fewer ports than decode",
    ),
    "no rank": ("workers.settings.tp=0", "tp"),
    "two GPUs for the Job": (
        "model.claim.enabled=true,model.prepare.codebooks=true,workers.image.flavor=cuda,"
        "model.job.resources.limits.nvidia\\.com/gpu=2",
        "model.job.resources: 2 GPUs, but the Job uses one",
    ),
    "GPU with an image for the CPU": ("workers.resources.limits.nvidia\\.com/gpu=1", "flavor"),
    "GPU with a device setting for the CPU": (
        "workers.image.flavor=cuda,workers.resources.limits.nvidia\\.com/gpu=1,"
        "workers.settings.device=cpu",
        "device cpu",
    ),
    "GPU for all roles": ("defaults.resources.limits.nvidia\\.com/gpu=1", "a gateway uses no GPU"),
    "GPU without a limit": (
        "workers.image.flavor=cuda,workers.resources.requests.nvidia\\.com/gpu=1",
        "limits of GPUs",
    ),
    "image without workers": ("workers.image.flavor=control", "flavor"),
    "transfer ports that contain the gRPC port": ("transfer.ports=8000-8010", "transfer.ports"),
    "transfer ports that contain the health port": ("transfer.ports=9091-9100", "transfer.ports"),
    "transfer ports in the wrong order": ("transfer.ports=21015-21000", "transfer.ports"),
    "transfer ports above the last port": ("transfer.ports=65530-65545", "transfer.ports"),
    "one service port for two protocols": ("gateway.service.grpcPort=80", "gateway.service"),
    "sidecar with a port of the gateway": (
        "gateway.extraContainers[0].name=a,gateway.extraContainers[0].image=a,"
        "gateway.extraContainers[0].ports[0].containerPort=8000",
        "gateway: ports: 8000",
    ),
    "sidecar with the name of the role": (
        "router.extraContainers[0].name=router,router.extraContainers[0].image=a",
        "router: containers: router",
    ),
    "sidecar without image": ("router.extraContainers[0].name=a", "image"),
    "misspelled key of a sidecar": (
        "router.extraContainers[0].name=a,router.extraContainers[0].image=a,"
        "router.extraContainers[0].arg=a",
        "arg",
    ),
    "volume with a name of the chart": (
        "router.volumes[0].name=tmp,router.volumes[0].emptyDir.medium=",
        "router: volumes: tmp",
    ),
    "mount in place of one of the chart": (
        "router.volumeMounts[0].name=tmp,router.volumeMounts[0].mountPath=/cache",
        "/cache",
    ),
    "claim of a device that is not used": (
        "workers.resourceClaims[0].name=gpu,workers.resourceClaims[0].resourceClaimName=a",
        "resourceClaims",
    ),
    "device without a claim": ("workers.resources.claims[0].name=gpu", "resourceClaims"),
    "rollout that cannot replace a pod": (
        "workers.strategy.rollingUpdate.maxUnavailable=0",
        "maxUnavailable",
    ),
    "gateways of a set that does not run": ("blueGreen.active=green", "blueGreen.active"),
    "no set of workers": ("blueGreen.sets={red}", "sets"),
    "two models with one name": (
        "blueGreen.sets={blue,green},model.servedName=m,blueGreen.green.model.path=other",
        "servedName",
    ),
    "claim for the model of one set": ("blueGreen.green.model.claim.enabled=true", "claim"),
    "misspelled key of a relabeling": (
        "monitoring.podMonitor.relabelings[0].targetlabel=a",
        "targetlabel",
    ),
    "no object": ("extraObjects[0]=3", "extraObjects"),
    "repository with a tag": ("image.repository=r.example.com:5000/headrace:1.0", "repository"),
    "repository with a scheme": ("image.repository=https://r.example.com/h", "repository"),
    "host with a scheme": ("ingress.enabled=true,ingress.hosts={https://a.example.com}", "hosts"),
    "host with a path": ("httpRoute.hostnames={a.example.com/v1}", "hostnames"),
    "token with a space": ("auth.clusterToken.value=a b", "value"),
    "token beside a Secret": (
        "auth.clusterToken.existingSecret=a,auth.clusterToken.secondValue=b",
        "auth.clusterToken",
    ),
    "key hashes beside a Secret": (
        f"auth.apiKeys.existingSecret=a,auth.apiKeys.hashes={{{'0' * 64}}}",
        "auth.apiKeys",
    ),
    "certificate without TLS": (
        "tls.certManager.enabled=true,tls.certManager.issuerRef.name=a",
        "tls.enabled",
    ),
    "path of a model without a volume": ("model.path=meta-llama/Llama-3-8B", "model.path"),
    "path of one model without a volume": (
        "blueGreen.sets={blue,green},blueGreen.green.model.path=other",
        "blueGreen.green.model.path",
    ),
    "KV formats that differ": ("decode.settings.kv_format=fp8", "settings.kv_format"),
    "KV formats that differ in one set": (
        "blueGreen.sets={blue,green},blueGreen.green.prefill.settings.kv_format=fp8",
        "blueGreen.green.prefill",
    ),
    "codec without codebooks": ("prefill.settings.codec=splitzip", "prefill.settings.codec"),
    "label that selects a release": (
        "commonLabels.app\\.kubernetes\\.io/instance=a",
        "commonLabels: the chart sets app.kubernetes.io/instance",
    ),
    "label that selects a role": (
        "workers.podLabels.app\\.kubernetes\\.io/component=a",
        "prefill.podLabels: app.kubernetes.io/component",
    ),
    "name that no Service can have": ("fullnameOverride=llm.a", "fullnameOverride"),
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
    token = ("--set", "auth.clusterToken.value=token,auth.clusterToken.existingSecret=")
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
        *("--set", "auth.clusterToken.value=token,auth.clusterToken.existingSecret="),
    )
    assert helm(version).render(*values, chart=str(package)) == helm(version).render(*values)


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("version", HELMS)
def test_wrong_values_are_refused(version: str, why: str) -> None:
    values, named_in_message = REFUSED[why]
    with pytest.raises(ToolError) as refused:
        helm(version).render("--set", values)
    message = str(refused.value)
    assert re.search(r"schema|execution error at", message), "a fault of a template"
    assert re.search(rf"(?<!\w){re.escape(named_in_message)}\b", message)


@pytest.mark.parametrize("setting", ["kv_format=dense", "kv_eviction=0"])
def test_default_of_a_setting_may_be_set_for_one_role(setting: str) -> None:
    helm("4.1").render("--set", f"prefill.settings.{setting}")


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
    errors = "\n".join(schema_errors(manifests, KUBERNETES[-1]))
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
