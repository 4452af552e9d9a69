"""An upgrade from the previous version of the chart.

``previous/`` contains the package of that version. Replace it when a version is released:
`helm package helm/headrace --destination tests/operate/chart/previous`.
"""

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operate.chart.manifests import HELMS, Manifest, containers, helm, pod_templates
from tests.operate.chart.tools import CHART

pytestmark = pytest.mark.operate

(PREVIOUS,) = (Path(__file__).parent / "previous").glob("headrace-*.tgz")
SCENARIOS = ("minimal-cpu", "one-gpu-node", "two-node-rdma", "autoscaled-production")
"""Scenarios whose values the previous version knows."""
TOKEN = ("--set", "auth.clusterToken.value=token,auth.clusterToken.existingSecret=")
MUTABLE = {
    "Deployment": {"replicas", "template", "strategy", "progressDeadlineSeconds"},
    "StatefulSet": {"replicas", "template", "updateStrategy", "minReadySeconds"},
    "PersistentVolumeClaim": {"resources"},
    "Job": {"suspend"},
}
"""Fields of a specification that API servers let a release change, by kind; other kinds: all."""
NEW_VARIABLES = {"HEADRACE_SECOND_CLUSTER_TOKEN"}
"""Variables that pods of this version have and those of the previous one have not."""
FORMER_ANNOTATION = "checksum/api-keys"
"""Annotation that only pods of the previous version have: gateways read new API keys themselves."""


def render(name: str, chart: str, version: str = "4.1") -> list[Manifest]:
    values = ("--values", str(CHART / f"ci/{name}-values.yaml"), *TOKEN)
    return helm(version).render(*values, chart=chart)


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(found["kind"], found["metadata"]["name"]): found for found in manifests}


def immutable(manifest: Manifest) -> dict[str, Any]:
    """Return the fields that an upgrade must not change."""
    changing = MUTABLE.get(manifest["kind"])
    if changing is None:
        return {}
    return {key: value for key, value in manifest["spec"].items() if key not in changing}


@pytest.fixture(params=SCENARIOS)
def versions(request: pytest.FixtureRequest) -> tuple[list[Manifest], list[Manifest]]:
    """Manifests of the previous and of this version of the chart, for a scenario."""
    return render(request.param, str(PREVIOUS)), render(request.param, str(CHART))


def test_previous_version_is_older() -> None:
    """Versions of packages cannot change, so a change of the chart needs a new version."""
    current = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    previous = PREVIOUS.stem.removeprefix("headrace-")
    assert [int(part) for part in previous.split(".")] < [int(part) for part in current.split(".")]


def test_upgrade_removes_no_object(versions: tuple[list[Manifest], list[Manifest]]) -> None:
    old, new = map(by_name, versions)
    removed = old.keys() - new.keys()
    assert [found for found in removed if found[0] != "Job"] == []  # its name has a hash


def test_upgrade_changes_no_immutable_field(
    versions: tuple[list[Manifest], list[Manifest]],
) -> None:
    old, new = map(by_name, versions)
    for found in old.keys() & new.keys():
        assert immutable(old[found]) == immutable(new[found]), found


def test_upgrade_of_the_chart_alone_changes_pods_only_as_listed(
    versions: tuple[list[Manifest], list[Manifest]],
) -> None:
    old, new = (dict(pod_templates(found)) for found in versions)
    assert old.keys() == new.keys()
    for component in old.keys() - {"test"}:
        for container in containers(new[component]):
            if "env" in container:
                container["env"] = [e for e in container["env"] if e["name"] not in NEW_VARIABLES]
        old[component]["metadata"].get("annotations", {}).pop(FORMER_ANNOTATION, None)
        assert old[component] == new[component]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("version", HELMS)
def test_values_of_the_previous_version_can_be_reused(
    version: str, name: str, tmp_path: Path
) -> None:
    """`helm upgrade --reuse-values` replaces the chart's values by those of the release."""
    chart = shutil.copytree(CHART, tmp_path / "headrace")
    with tarfile.open(PREVIOUS) as package:
        values = package.extractfile("headrace/values.yaml")
        assert values is not None
        (chart / "values.yaml").write_bytes(values.read())
    assert render(name, str(chart), version) == render(name, str(CHART), version)
