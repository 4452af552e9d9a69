"""Rendered pods agree with the services: settings, ports, probes, connections, drains."""

import json
import os
import re
from itertools import product

import pytest

from services.common.settings import ServiceSettings
from tests.operate.chart.manifests import (
    ROLES,
    SCENARIOS,
    Manifest,
    containers,
    helm,
    main_container,
    named,
    of_kind,
    pod_of,
    pod_templates,
    scenario,
)
from tests.operate.chart.settings_schema import SETTINGS

pytestmark = pytest.mark.operate

OTHER_VARIABLES = re.compile("HOME|HEADRACE_CACHE|[A-Z]+_CACHE_DIR|OMP_NUM_THREADS|UCX_.*|OTEL_.*")
"""Variables of libraries, and the folder for caches."""

ARROWS = {
    ("gateway", "router"): {8002},
    ("gateway", "prefill"): {8003},
    ("gateway", "decode"): {8003},
    ("prefill", "router"): {8002},
    ("decode", "router"): {8002},
    ("decode", "prefill"): {8003, range(21000, 21016)},
    ("prefill", "decode"): {8003, range(21000, 21016)},
    ("test", "gateway"): {8000},
}
"""Ports to which a role may connect, by caller and called role. 21000 to 21015: KV transfers."""

CASES = list(product(SCENARIOS, ROLES))


def variables(container: Manifest) -> dict[str, str]:
    """Return the environment of a container; values from elsewhere are placeholders."""
    return {entry["name"]: entry.get("value", "placeholder") for entry in container["env"]}


def effective(
    role: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> ServiceSettings:
    """Return the settings that a service reads from an environment."""
    for name in [name for name in os.environ if name.startswith(("HEADRACE_", "OTEL_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return SETTINGS[role].load()


@pytest.mark.parametrize(("name", "role"), CASES)
def test_every_variable_is_a_setting(name: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = variables(main_container(pod_of(scenario(name), role)))
    settings = effective(role, environment, monkeypatch).model_dump(mode="json")
    for variable, value in environment.items():
        if OTHER_VARIABLES.fullmatch(variable):
            continue
        setting = re.sub(f"HEADRACE_({role.upper()}_)?", "", variable).lower()
        if setting in ("cluster_token", "second_cluster_token"):
            continue  # their values are hidden
        found = settings[setting]  # an unknown variable has no setting
        assert (value if isinstance(found, str) else json.loads(value)) == found, variable


@pytest.mark.parametrize(("name", "role"), CASES)
def test_ports_and_probes_are_those_of_the_settings(
    name: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = main_container(pod_of(scenario(name), role))
    settings = effective(role, variables(container), monkeypatch)
    assert (container["command"], container["args"]) == (["headrace"], [role])
    names = ("port", "grpc_port", "metrics_port", "health_port")
    served = {getattr(settings, port) for port in names if getattr(settings, port, None)}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(ports.values()) == served
    paths = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "health"}
    assert ports["health"] == settings.health_port


@pytest.mark.parametrize(("name", "role"), CASES)
def test_grace_is_longer_than_the_drain(
    name: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = pod_of(scenario(name), role)
    container = main_container(pod)
    settings = effective(role, variables(container), monkeypatch)
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["spec"]["terminationGracePeriodSeconds"] >= settings.drain_s + sleep + 15


def test_drain_of_a_role_sets_its_grace() -> None:
    pods = dict(pod_templates(scenario("autoscaled-production")))
    graces = {role: pods[role]["spec"]["terminationGracePeriodSeconds"] for role in ROLES}
    assert graces == {"gateway": 145, "router": 140, "prefill": 140, "decode": 620}


def policy_ports(rule: Manifest) -> set[int | range]:
    return {
        range(int(port["port"]), int(port["endPort"]) + 1) if "endPort" in port else port["port"]
        for port in rule["ports"]
        if port["protocol"] == "TCP"
    }


def peers(rule: Manifest, direction: str) -> list[str]:
    """Return the roles that a rule names; "any" without peers."""
    given = rule.get({"ingress": "from", "egress": "to"}[direction])
    if given is None:
        return ["any"]
    return [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in given]


@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_network_policies_allow_exactly_the_connections_of_the_services(direction: str) -> None:
    manifests = scenario("minimal-cpu")
    found: dict[tuple[str, str], set[int | range]] = {}
    for role in (*ROLES, "test"):
        spec = named(manifests, "NetworkPolicy", f"r-headrace-{role}")["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == role
        for rule in spec.get(direction, []):
            for peer in peers(rule, direction):
                arrow = (peer, role) if direction == "ingress" else (role, peer)
                found[arrow] = found.get(arrow, set()) | policy_ports(rule)
    anyone: dict[tuple[str, str], set[int | range]]
    if direction == "ingress":  # clients, and scrapers of metrics
        anyone = {
            ("any", "gateway"): {8000, 8001, 9090},
            ("any", "router"): {8002},
            ("any", "prefill"): {9090},
            ("any", "decode"): {9090},
        }
    else:  # DNS
        anyone = {(role, "any"): {53} for role in (*ROLES, "test")}
    assert found == ARROWS | anyone


def test_clients_and_monitoring_can_be_restricted() -> None:
    manifests = scenario("autoscaled-production")
    for role in ROLES:
        spec = named(manifests, "NetworkPolicy", f"r-headrace-{role}")["spec"]
        assert all(rule.get("from") for rule in spec["ingress"])
    gateway = named(manifests, "NetworkPolicy", "r-headrace-gateway")["spec"]
    named_peers = [peer.get("podSelector") for rule in gateway["ingress"] for peer in rule["from"]]
    assert '"test"' in json.dumps(named_peers)  # `helm test` still reaches the gateway
    scrapes = [rule for rule in gateway["ingress"] if '"monitoring"' in json.dumps(rule["from"])]
    assert [policy_ports(rule) for rule in scrapes] == [{8000}]  # of the PodMonitor, with a pool


@pytest.mark.parametrize("name", SCENARIOS)
def test_pods_have_no_token_and_no_service_links(name: str) -> None:
    for _, pod in pod_templates(scenario(name)):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("name", SCENARIOS)
def test_selectors_select_the_pods_of_one_role(name: str) -> None:
    pods = {role: pod["metadata"]["labels"] for role, pod in pod_templates(scenario(name))}
    for kind in ("Deployment", "StatefulSet", "PodDisruptionBudget", "Service"):
        for manifest in of_kind(scenario(name), kind):
            selector = manifest["spec"]["selector"]
            labels = (selector if kind == "Service" else selector["matchLabels"]).items()
            component = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
            assert [role for role, own in pods.items() if labels <= own.items()] == [component]


@pytest.mark.parametrize("name", SCENARIOS)
def test_volumes_and_secrets_of_pods_exist(name: str) -> None:
    manifests = scenario(name)
    secrets = {manifest["metadata"]["name"] for manifest in of_kind(manifests, "Secret")}
    made = {s for s in secrets if s.startswith("r-headrace")}
    for _, pod in pod_templates(manifests):
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        assert len(volumes) == len(pod["spec"].get("volumes", []))
        mounted = {m["name"] for box in containers(pod) for m in box.get("volumeMounts", [])}
        assert mounted == volumes.keys()
        for box in containers(pod):
            names = [entry["name"] for entry in box.get("env", [])]
            assert len(names) == len(set(names))
            for entry in box.get("env", []):
                reference = entry.get("valueFrom", {}).get("secretKeyRef", {}).get("name", "")
                if reference.startswith("r-headrace"):
                    assert reference in made


@pytest.mark.parametrize("name", SCENARIOS)
def test_autoscaled_workloads_have_no_fixed_replicas(name: str) -> None:
    manifests = scenario(name)
    scalers = [*of_kind(manifests, "HorizontalPodAutoscaler"), *of_kind(manifests, "ScaledObject")]
    scaled = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers}
    fixed = {
        deployment["metadata"]["name"]
        for deployment in of_kind(manifests, "Deployment")
        if "replicas" in deployment["spec"]
    }
    assert scaled.isdisjoint(fixed)
    assert scaled | fixed == {d["metadata"]["name"] for d in of_kind(manifests, "Deployment")}


def test_workers_register_with_each_router() -> None:
    manifests = scenario("autoscaled-production")
    (router,) = of_kind(manifests, "StatefulSet")
    service = named(manifests, "Service", router["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    urls = [
        f"https://{router['metadata']['name']}-{number}.{service['metadata']['name']}.serving.svc:8002"
        for number in range(router["spec"]["replicas"])
    ]
    for role in ("gateway", "prefill", "decode"):
        environment = variables(main_container(pod_of(manifests, role)))
        assert json.loads(environment[f"HEADRACE_{role.upper()}_ROUTERS"]) == urls


def test_labels_of_metrics_are_kept_and_deployments_are_told_apart() -> None:
    """The operator's target label `endpoint` would replace the label of that name."""
    (monitor,) = of_kind(scenario("autoscaled-production"), "PodMonitor")
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        relabelings = endpoint["relabelings"]
        assert {"action": "labeldrop", "regex": "endpoint"} in relabelings
        added = {entry["targetLabel"] for entry in relabelings if "targetLabel" in entry}
        assert added == {"component", "job", "release"}


@pytest.mark.parametrize("role", ["gateway", "decode"])
def test_rollout_may_take_as_long_as_workers_need_to_start(role: str) -> None:
    values = ("--set", "workers.startupSeconds=3600,decode.strategy.type=Recreate")
    manifests = scenario("minimal-cpu", *values)
    deployment = named(manifests, "Deployment", f"r-headrace-{role}")
    assert deployment["spec"]["progressDeadlineSeconds"] == 4200
    recreated = deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert recreated == (role == "decode"), "rollingUpdate is invalid with Recreate"


def test_services_listen_on_ipv6_if_asked() -> None:
    manifests = scenario("minimal-cpu", "--set", "host=::")
    for role in ROLES:
        environment = variables(main_container(pod_of(manifests, role)))
        assert environment[f"HEADRACE_{role.upper()}_HOST"] == "::"


def test_downloads_have_the_environment_of_workers() -> None:
    """Such as a proxy, without which the hub cannot be reached."""
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    values = ("--set-json", f"defaults.env={json.dumps([proxy])}")
    job = pod_of(scenario("two-node-rdma", *values), "model")
    pods = scenario("minimal-cpu", *values, "--set", "model.fetch.repository=a/b")
    for container in (containers(job)[0], containers(pod_of(pods, "decode"))[0]):
        assert container["name"] == "model"
        assert proxy in container["env"]
        assert container["resources"]


def test_preparation_of_another_model_has_other_names() -> None:
    def names(*arguments: str) -> tuple[str, str]:
        manifests = scenario("two-node-rdma", *arguments)
        (job,) = of_kind(manifests, "Job")
        environment = variables(main_container(pod_of(manifests, "decode")))
        return job["metadata"]["name"], environment["HEADRACE_DECODE_MODEL"]

    job, model = names()
    other_job, other_model = names("--set-json", 'model.prepare={"keep": 0.7}')
    assert (job, model) == names("--set", "decode.replicas=5")
    assert job != other_job
    assert model != other_model
    new_pod, same_model = names("--set", "workers.image.tag=0.2.0")  # a Job's pod is immutable
    assert new_pod != job
    assert same_model == model


def test_names_stay_in_their_bounds_with_a_long_release_name() -> None:
    values = ("--values", "ci/two-node-rdma-values.yaml", "--set", f"fullnameOverride={'r' * 80}")
    manifests = helm("4.1").render(*values)
    assert max(len(manifest["metadata"]["name"]) for manifest in manifests) <= 63


def test_new_version_of_the_chart_alone_restarts_nothing() -> None:
    for component, pod in pod_templates(scenario("minimal-cpu")):
        if component in ROLES:
            assert "helm.sh/chart" not in pod["metadata"]["labels"]
