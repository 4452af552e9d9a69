"""Releases in one namespace do not share objects, pods or names, also if their names are long."""

import re
from itertools import combinations

import pytest

from tests.operate.chart.manifests import Manifest, helm, of_kind, pod_templates

pytestmark = pytest.mark.operate

LONG = "inference-platform-production-europe-west"
RELEASES = {
    "short": ("one", "two"),
    "one begins like the other": ("headrace", "headrace-decode"),
    "one ends like a set of workers": ("headrace", "headrace-green"),
    "equal in the first 40 characters": (f"{LONG}-1", f"{LONG}-2"),
}
SCENARIOS = ("autoscaled-production", "two-node-rdma", "one-gpu-node")
VALUES = ("--set", "blueGreen.sets={blue,green},blueGreen.green.model.servedName=other")


def release(name: str, scenario: str) -> list[Manifest]:
    return helm("4.1").render("--values", f"ci/{scenario}-values.yaml", *VALUES, release=name)


def names(manifests: list[Manifest]) -> set[tuple[str, str]]:
    return {(found["kind"], found["metadata"]["name"]) for found in manifests}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", RELEASES)
def test_two_releases_share_no_object_and_no_pod(case: str, scenario: str) -> None:
    pair = [release(name, scenario) for name in RELEASES[case]]
    assert names(pair[0]).isdisjoint(names(pair[1]))
    for manifests, other in (pair, reversed(pair)):
        pods = [pod["metadata"]["labels"].items() for _, pod in pod_templates(other)]
        for kind in (
            "Deployment",
            "StatefulSet",
            "PodDisruptionBudget",
            "NetworkPolicy",
            "Service",
        ):
            for found in of_kind(manifests, kind):
                spec = found["spec"]
                selector = spec.get("podSelector", spec.get("selector"))
                labels = selector.get("matchLabels", selector).items()
                assert not any(labels <= pod for pod in pods), found["metadata"]["name"]


def selects(query: str, series: dict[str, str]) -> bool:
    """Return whether the selector of a query matches the labels of a series, as in Prometheus."""
    matchers = re.findall(r'(\w+)(=~|!~|=)"([^"]*)"', query)
    assert matchers
    return all(
        bool(re.fullmatch(value if "~" in operator else re.escape(value), series[label]))
        != operator.startswith("!")
        for label, operator, value in matchers
    )


@pytest.mark.parametrize("case", RELEASES)
def test_autoscaler_reads_only_the_workers_that_it_scales(case: str) -> None:
    pair = [(name, release(name, "autoscaled-production")) for name in RELEASES[case]]
    series = {
        workload["metadata"]["name"]: {
            "namespace": "serving",
            "release": name,
            "pod": f"{workload['metadata']['name']}-6f7c9d5b8f-x2x4z",
        }
        for name, manifests in pair
        for workload in of_kind(manifests, "Deployment")
    }
    for _, manifests in pair:
        scalers = of_kind(manifests, "ScaledObject")
        assert scalers
        for scaler in scalers:
            for trigger in scaler["spec"]["triggers"]:
                query = trigger["metadata"]["query"]
                found = [name for name, labels in series.items() if selects(query, labels)]
                assert found == [scaler["spec"]["scaleTargetRef"]["name"]]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_names_and_labels_stay_in_their_bounds(scenario: str) -> None:
    manifests = release("r" * 53, scenario)
    assert max(len(name) for _, name in names(manifests)) <= 63
    pods = [pod["metadata"]["labels"] for _, pod in pod_templates(manifests)]
    labels = [found["metadata"].get("labels", {}) for found in manifests] + pods
    assert max(len(value) for one in labels for value in one.values()) <= 63


def test_long_names_that_differ_at_their_end_stay_distinct() -> None:
    """Also those of fullnameOverride and nameOverride."""
    for override in ("fullnameOverride", "nameOverride"):
        found = [
            names(helm("4.1").render("--set", f"{override}={'n' * 64}{end}")) for end in ("a", "b")
        ]
        assert all(one.isdisjoint(other) for one, other in combinations(found, 2))


def test_short_names_have_no_hash() -> None:
    manifests = helm("4.1").render("--set", f"fullnameOverride={'n' * 40}")
    assert ("Deployment", f"{'n' * 40}-gateway") in names(manifests)
