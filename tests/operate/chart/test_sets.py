"""A second set of workers serves another model before the first set ends."""

import json
import re

import pytest

from tests.operate.chart.manifests import (
    Manifest,
    main_container,
    named,
    of_kind,
    pod_of,
    pod_templates,
    scenario,
)

pytestmark = pytest.mark.operate

GREEN = ("prefill-green", "decode-green")


def variable(manifests: list[Manifest], component: str, name: str) -> str | None:
    """Return a setting of a service from its environment."""
    role = component.removesuffix("-green").upper()
    env = main_container(pod_of(manifests, component))["env"]
    return next((one["value"] for one in env if one["name"] == f"HEADRACE_{role}_{name}"), None)


def without_labels(pod: Manifest) -> Manifest:
    return {key: value for key, value in pod.items() if key != "metadata"}


def test_second_set_has_its_own_values() -> None:
    manifests = scenario("model-change")
    for role in ("prefill", "decode"):
        assert variable(manifests, role, "MODEL") == "/models/Meta-Llama-3-8B-Instruct"
        assert variable(manifests, role, "KV_FORMAT") is None
        green = f"{role}-green"
        assert variable(manifests, green, "MODEL") == "/models/Meta-Llama-3.1-8B-Instruct"
        assert variable(manifests, green, "KV_FORMAT") == "fp8"
        assert variable(manifests, green, "ROUTERS") == variable(manifests, role, "ROUTERS")
        assert named(manifests, "Deployment", f"r-headrace-{green}")["spec"]["replicas"] == 2


def test_change_of_the_gateways_restarts_no_worker() -> None:
    first = scenario("model-change")
    second = scenario("model-change", "--set", "blueGreen.active=green")
    last = scenario("model-change", "--set", "blueGreen.active=green,blueGreen.sets={green}")
    models = [variable(found, "gateway", "MODEL") for found in (first, second, last)]
    old, new = "/models/Meta-Llama-3-8B-Instruct", "/models/Meta-Llama-3.1-8B-Instruct"
    assert models == [old, new, new]
    for role in ("prefill", "decode"):
        assert pod_of(first, role) == pod_of(second, role)
    for role in GREEN:
        assert pod_of(first, role) == pod_of(second, role) == pod_of(last, role)
    assert {"prefill", "decode"}.isdisjoint(dict(pod_templates(last)))
    assert pod_of(second, "gateway") == pod_of(last, "gateway")


def test_first_set_is_the_same_without_a_second_one() -> None:
    both, one = scenario("model-change"), scenario("model-change", "--set", "blueGreen.sets={blue}")
    for role in ("gateway", "router", "prefill", "decode"):
        assert pod_of(both, role) == pod_of(one, role)
    assert set(GREEN).isdisjoint(dict(pod_templates(one)))


def test_workers_of_both_sets_may_connect_if_they_are_compatible() -> None:
    manifests = scenario("model-change")
    for caller, called in (("gateway", "decode-green"), ("decode", "prefill-green")):
        egress = named(manifests, "NetworkPolicy", f"r-headrace-{caller}")["spec"]["egress"]
        ingress = named(manifests, "NetworkPolicy", f"r-headrace-{called}")["spec"]["ingress"]
        assert f'"{called}"' in json.dumps(egress)
        assert f'"{caller}"' in json.dumps(ingress)


def test_metrics_of_both_sets_have_the_label_of_their_role() -> None:
    (monitor,) = of_kind(scenario("model-change"), "PodMonitor")
    for component in ("gateway", "router", "prefill", "decode", *GREEN):
        found = []
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            keep, label = endpoint["relabelings"][:2]
            if re.fullmatch(keep["regex"], component):
                match = re.fullmatch(label["regex"], component)
                found.append(match and match[1])
        assert found == [component.removesuffix("-green")]


def test_queries_of_keda_tell_the_sets_apart() -> None:
    manifests = scenario(
        "autoscaled-production",
        *("--set", "blueGreen.sets={blue,green},blueGreen.green.model.path=other"),
    )
    pods = {
        "decode": "r-headrace-decode-6d5f7c9b8d-x2x4z",
        "decode-green": "r-headrace-decode-green-7c9b8d6d5f-z4x2x",
    }
    for scaled in pods:
        scaler = named(manifests, "ScaledObject", f"r-headrace-{scaled}")
        assert scaler["spec"]["scaleTargetRef"]["name"] == f"r-headrace-{scaled}"
        for trigger in scaler["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            (include,) = re.findall(r'pod=~"([^"]+)"', query)
            exclude = re.findall(r'pod!~"([^"]+)"', query)
            chosen = [
                name
                for name, pod in pods.items()
                if re.fullmatch(include, pod) and not any(re.fullmatch(e, pod) for e in exclude)
            ]
            assert chosen == [scaled]


def test_each_set_is_prepared_by_a_job_of_its_own() -> None:
    manifests = scenario(
        "two-node-rdma",
        *("--set", "blueGreen.sets={blue,green}"),
        *("--set-json", "blueGreen.green.model.prepare.keep=0.7"),
    )
    jobs = of_kind(manifests, "Job")
    components = [job["metadata"]["labels"]["app.kubernetes.io/component"] for job in jobs]
    assert sorted(components) == ["model", "model-green"]
    policies = {policy["metadata"]["name"] for policy in of_kind(manifests, "NetworkPolicy")}
    assert {"r-headrace-model", "r-headrace-model-green"} <= policies
    models = {variable(manifests, role, "MODEL") for role in ("decode", "decode-green")}
    assert len(models) == 2
    assert len(of_kind(manifests, "PersistentVolumeClaim")) == 1


def test_volume_of_the_second_set_replaces_that_of_the_first() -> None:
    volume = {"image": {"reference": "registry.example.com/models/new:1"}}
    manifests = scenario(
        "model-change", "--set-json", f"blueGreen.green.model.volume={json.dumps(volume)}"
    )
    for component, expected in (
        ("decode", {"persistentVolumeClaim": {"claimName": "models"}}),
        ("decode-green", volume),
        ("gateway", {"persistentVolumeClaim": {"claimName": "models"}}),
    ):
        volumes = pod_of(manifests, component)["spec"]["volumes"]
        assert {"name": "models", **expected} in volumes
