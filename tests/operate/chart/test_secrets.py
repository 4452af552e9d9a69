"""Tokens and API keys of the chart: both cluster tokens reach all pods, and what restarts them."""

import base64
from collections.abc import Iterator

import pytest

from tests.operate.chart.manifests import (
    ROLES,
    SCENARIOS,
    Manifest,
    main_container,
    named,
    pod_of,
    pod_templates,
    scenario,
)

pytestmark = pytest.mark.operate

OLD, NEW = "the-old-token", "the-new-token"
STEPS = ((OLD, ""), (OLD, NEW), (NEW, OLD), (NEW, ""))
"""Token and second token before the rotation and in its steps, as in helm/README.md."""


def rotated(token: str, second: str) -> list[Manifest]:
    values = f"auth.clusterToken.value={token},auth.clusterToken.secondValue={second}"
    return scenario("minimal-cpu", "--set", values)


def token_references(pod: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Yield the variables of a pod for cluster tokens, with the references to their Secrets."""
    for entry in main_container(pod)["env"]:
        if entry["name"].endswith("CLUSTER_TOKEN"):
            yield entry["name"], entry["valueFrom"]["secretKeyRef"]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("role", ROLES)
def test_pods_read_both_tokens_of_one_secret_in_which_the_second_may_be_missing(
    name: str, role: str
) -> None:
    found = dict(token_references(pod_of(scenario(name), role)))
    assert found.keys() == {"HEADRACE_CLUSTER_TOKEN", "HEADRACE_SECOND_CLUSTER_TOKEN"}
    first, second = found["HEADRACE_CLUSTER_TOKEN"], found["HEADRACE_SECOND_CLUSTER_TOKEN"]
    assert (first["key"], second["key"]) == ("token", "second-token")
    assert first["name"] == second["name"]
    assert "optional" not in first
    assert second["optional"] is True


def test_steps_of_a_rotation_change_the_secret_and_restart_all_pods() -> None:
    previous: dict[str, Manifest] = {}
    for token, second in STEPS:
        manifests = rotated(token, second)
        data = named(manifests, "Secret", "r-headrace-token")["data"]
        expected = {"token": token} | ({"second-token": second} if second else {})
        assert {key: base64.b64decode(value).decode() for key, value in data.items()} == expected
        pods = {role: pod for role, pod in pod_templates(manifests) if role in ROLES}
        assert pods.keys() == {*ROLES}
        assert all(pods[role] != pod for role, pod in previous.items())
        previous = pods


def test_changed_api_keys_restart_no_pod() -> None:
    """Gateways read the mounted file again."""

    def rendered(digits: str) -> dict[str, Manifest]:
        values = f"auth.apiKeys.hashes={{{digits * 64}}},auth.clusterToken.value={OLD}"
        return dict(pod_templates(scenario("minimal-cpu", "--set", values)))

    assert rendered("a") == rendered("b")
