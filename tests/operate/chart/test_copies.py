"""The chart has no links, and its alerts and dashboards are those of ``deploy/``."""

from tests.operate.chart.copies import FILES, copies
from tests.operate.chart.tools import CHART


def test_chart_contains_no_links() -> None:
    """Flux leaves links out of a chart, and Argo CD refuses those that lead out of a repository."""
    assert [path for path in CHART.rglob("*") if path.is_symlink()] == []


def test_alerts_and_dashboards_are_those_of_deploy() -> None:
    found = {path for path in FILES.rglob("*") if path.is_file()} - {FILES / "completion.py"}
    assert found == copies().keys()
    for copy, original in copies().items():
        assert copy.read_bytes() == original.read_bytes(), (
            "run `python -m tests.operate.chart.copies`"
        )
