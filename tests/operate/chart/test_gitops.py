"""The chart as Flux and Argo CD package and render it."""

import shutil
from pathlib import Path

import pytest

from tests.operate.chart.manifests import HELMS, SCENARIOS, Manifest, helm, of_kind, scenario
from tests.operate.chart.tools import CHART, ToolError

pytestmark = pytest.mark.operate

TOKEN = ("--set", "auth.clusterToken.value=token,auth.clusterToken.existingSecret=")


def flux_package(version: str, folder: Path) -> Path:
    """Package a copy of the chart without links, which Flux leaves out of its archives."""
    source = folder / CHART.name
    for path in CHART.rglob("*"):
        if path.is_file() and not path.is_symlink():
            copy = source / path.relative_to(CHART)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    done = helm(version).run("package", str(source), cwd=folder)
    assert done.returncode == 0, done.stderr
    (package,) = folder.glob("headrace-*.tgz")
    return package


@pytest.mark.parametrize("version", HELMS)
def test_chart_that_flux_packages_renders_like_the_folder(version: str, tmp_path: Path) -> None:
    package = flux_package(version, tmp_path)
    for name in SCENARIOS:
        values = ("--values", str(CHART / f"ci/{name}-values.yaml"), *TOKEN)
        rendered = helm(version).render(*values, chart=str(package))
        assert rendered == scenario(name, *TOKEN, version=version)
        for rule in of_kind(rendered, "PrometheusRule"):
            assert rule["spec"]["groups"]


@pytest.mark.parametrize("missing", ["files/rules.yaml", "files/dashboards"])
def test_chart_without_its_files_is_refused(missing: str, tmp_path: Path) -> None:
    """API servers accept a PrometheusRule whose groups are null."""
    chart = shutil.copytree(CHART, tmp_path / "headrace")
    path = chart / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    values = ("--values", str(CHART / "ci/autoscaled-production-values.yaml"))
    with pytest.raises(ToolError, match=f"lacks {missing}"):
        helm("4.1").render(*values, chart=str(chart))


def argo_render(chart: Path, name: str, *arguments: str) -> list[Manifest]:
    """Render as Argo CD does, from a checkout and without access to the cluster."""
    command = ("--include-crds", "--kube-version", "1.35.0", "--api-versions", "keda.sh/v1alpha1")
    values = ("--values", str(chart / f"ci/{name}-values.yaml"), *arguments)
    return helm("3.17").render(*command, *values, chart=str(chart))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rendering_of_argo_is_the_same(name: str, tmp_path: Path) -> None:
    """Otherwise Argo CD applies changes, such as a new cluster token, with each synchronization."""
    chart = shutil.copytree(CHART, tmp_path / "headrace", symlinks=True)
    token = ("--set", "auth.clusterToken.existingSecret=cluster-token")
    first, second = (argo_render(chart, name, *token) for _ in range(2))
    assert first == second
