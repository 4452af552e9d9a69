"""Screenshots of reports for the README: ``python -m tests.loadgen.screenshots``.

The reports are those of simulated runs, so that the images do not depend on the machine. Writes
``deploy/images/loadgen-*.png``.
"""

import tempfile
from pathlib import Path

from loadgen.measures import Window
from loadgen.report import run_page, sweep_page, write_page
from tests.loadgen.made_runs import document_of, records_of, sweep_of
from tests.operate.browser import chromium

IMAGES = Path(__file__).parents[2] / "deploy" / "images"
SIZE = (1200, 980)
RATES = (2.0, 8.0, 16.0, 24.0, 32.0, 40.0)
MODEL = {"model": "simulated model"}


def run_report() -> str:
    """Return the report of a run that misses one of its requirements."""
    records = records_of(22, 60, failing=0.02)
    document = document_of(
        records, Window(10, 60), requirements=["ttft:p99<=0.1", "attainment>=0.95"]
    )
    document["manifest"] |= MODEL
    return run_page(records, document)


def sweep_report() -> str:
    """Return the report of a sweep beyond saturation."""
    sweep = sweep_of(RATES)
    sweep["manifest"] |= MODEL
    return sweep_page(sweep)


def main() -> None:
    """Write the images."""
    with tempfile.TemporaryDirectory() as name, chromium(Path(name)) as browser:
        for report in (run_report, sweep_report):
            kind = report.__name__.removesuffix("_report")
            page = Path(name) / f"{kind}.html"
            write_page(page, report())
            for scheme in ("light", "dark"):
                browser.emulate(*SIZE, dark=scheme == "dark")
                browser.driver.get(page.as_uri())
                browser.screenshot(IMAGES / f"loadgen-{kind}-{scheme}.png")


if __name__ == "__main__":
    main()
