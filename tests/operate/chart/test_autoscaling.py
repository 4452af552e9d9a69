"""Autoscalers own the number of pods, and an upgrade keeps what they have set."""

import base64

import pytest

from tests.operate.chart.api_server import api_server
from tests.operate.chart.manifests import HELMS, Manifest, helm, named, of_kind, scenario

pytestmark = pytest.mark.operate

AUTOSCALED = ("--values", "ci/autoscaled-production-values.yaml")


def metadata(name: str) -> Manifest:
    """Return the metadata of an object of the release."""
    return {
        "name": f"r-headrace-{name}",
        "namespace": "serving",
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {
            "meta.helm.sh/release-name": "r",
            "meta.helm.sh/release-namespace": "serving",
        },
    }


def running(name: str, replicas: int) -> Manifest:
    kind = {"apiVersion": "apps/v1", "kind": "Deployment"}
    return {**kind, "metadata": metadata(name), "spec": {"replicas": replicas}}


def upgraded(version: str, objects: list[Manifest], *values: str) -> list[Manifest]:
    """Render as an upgrade of a release does, whose objects are in the cluster."""
    values = values or AUTOSCALED
    with api_server(objects, helm(version).render(*values)) as url:
        server = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url)
        return helm(version).render(*values, *server)


def replicas(manifests: list[Manifest], name: str) -> int | None:
    found: int | None = named(manifests, "Deployment", f"r-headrace-{name}")["spec"].get("replicas")
    return found


@pytest.mark.parametrize("version", HELMS)
def test_turning_on_an_autoscaler_keeps_the_running_pods(version: str) -> None:
    """A number that a release no longer sets becomes 1."""
    objects = [running("gateway", 5), running("prefill", 3), running("decode", 7)]
    manifests = upgraded(version, objects)
    found = {name: replicas(manifests, name) for name in ("gateway", "prefill", "decode")}
    assert found == {"gateway": 5, "prefill": 3, "decode": 7}


def test_autoscaled_deployment_gets_at_least_the_minimum() -> None:
    """An autoscaler ignores a Deployment without pods."""
    manifests = upgraded("4.1", [running("prefill", 1), running("decode", 0)])
    assert replicas(manifests, "prefill") == 2
    assert replicas(manifests, "decode") is None  # becomes 1


def test_new_release_leaves_the_number_to_the_autoscaler() -> None:
    assert replicas(upgraded("4.1", []), "prefill") is None


def test_number_without_autoscaler_is_that_of_the_values() -> None:
    values = ("--set", "prefill.replicas=2,decode.replicas=3")
    manifests = upgraded("4.1", [running("decode", 9)], *values)
    assert (replicas(manifests, "prefill"), replicas(manifests, "decode")) == (2, 3)


@pytest.mark.parametrize("version", HELMS)
def test_upgrade_keeps_the_generated_token(version: str) -> None:
    token = base64.b64encode(b"between-us").decode()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata("token"),
        "data": {"token": token},
    }
    manifests = upgraded(version, [secret], "--values", "ci/minimal-cpu-values.yaml")
    assert named(manifests, "Secret", "r-headrace-token")["data"] == {"token": token}


def test_sidecar_does_not_count_for_the_cpu_target() -> None:
    """Without a CPU request of each container, an autoscaler by the pod's CPU does nothing."""
    manifests = scenario("autoscaled-production")
    (scaler,) = of_kind(manifests, "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["containerResource"]["container"] == "gateway"
