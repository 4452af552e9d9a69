"""Copies of the alerts and dashboards of ``deploy/`` in the chart.

A chart cannot contain links: Flux leaves them out of its archives. `python -m
tests.operate.chart.copies` updates the copies.
"""

from pathlib import Path

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FILES = ROOT / "helm" / "headrace" / "files"


def copies() -> dict[Path, Path]:
    """Return the original of each copy, by the path of the copy."""
    dashboards = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
    return {
        FILES / "rules.yaml": DEPLOY / "prometheus/rules.yaml",
        **{FILES / "dashboards" / board.name: board for board in dashboards},
    }


def main() -> None:
    """Write the copies, and remove dashboards without an original."""
    for path in (FILES / "dashboards").glob("*.json"):
        path.unlink()
    for copy, original in copies().items():
        copy.write_bytes(original.read_bytes())


if __name__ == "__main__":
    main()
