"""Reports of nearly empty runs and of a very long one."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadgen.measures import Window
from loadgen.record import Failure, Record
from loadgen.report import compare_page, run_page, sweep_page, write_page
from tests.loadgen.made_runs import comparison_of, document_of, records_of, sweep_of
from tests.loadgen.page_content import Content, number

pytestmark = pytest.mark.slow


def refused() -> tuple[list[Record], dict[str, Any]]:
    records = records_of(5, 5)
    for record in records:
        record.times = []
        record.counts = []
        record.failure = Failure.REFUSED
        record.detail = "no connection"
    return records, document_of(records, Window(0, 5))


def unsent() -> tuple[list[Record], dict[str, Any]]:
    records = [Record(0, 1.0, 5, 5)]
    return records, document_of(records, Window(0, 30), stopped=True)


def stopped() -> tuple[list[Record], dict[str, Any]]:
    records = records_of(10, 20)
    for record in records:
        record.ended = record.ended if record.ended and record.ended < 5 else None
        record.times = [at for at in record.times if at < 5]
        record.counts = record.counts[: len(record.times)]
        record.sent = record.sent if record.due < 5 else None
    return records, document_of(records, Window(0, 60), stopped=True)


def all_equal() -> tuple[list[Record], dict[str, Any]]:
    records = [
        Record(n, float(n), 5, 2, float(n), [n + 0.5, n + 0.5], [1, 1], n + 0.5) for n in range(5)
    ]
    return records, document_of(records, Window(0, 5))


def nothing_due() -> tuple[list[Record], dict[str, Any]]:
    records = records_of(10, 3)
    return records, document_of(records, Window(50, 60), requirements=["ttft:p99<=1"])


@pytest.mark.parametrize("made", [refused, unsent, stopped, all_equal, nothing_due])
def test_nearly_empty_runs_have_a_report(made: Any) -> None:
    records, document = made()
    page = run_page(records, json.loads(json.dumps(document)))
    content = Content(page)
    assert number(content.tile("Requests failed")[1].split()[0]) == sum(
        document["outcomes"]["failed"].values()
    )
    assert ("Interrupted" in page) == document["stopped"]
    assert "nan" not in page.lower().replace("nano", "")
    for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(one)


def test_nearly_empty_sweeps_have_a_report() -> None:
    one = sweep_of((4.0,), seeds=1, objectives={})
    assert one["knee"] is None
    content = Content(sweep_page(one))
    assert "Attainment" not in " ".join(content.rows[0])
    nothing = one | {"points": [one["points"][0] | {"figures": {}, "invalid": "nothing was sent"}]}
    assert "Nothing was measured" in sweep_page(nothing)
    assert "one run" in compare_page(comparison_of(one, one))
    assert "0" in compare_page(comparison_of(one, one) | {"rows": []})


@pytest.mark.long
def test_report_size_is_bounded_for_long_runs(tmp_path: Path) -> None:
    pages = []
    for seconds in (100, 2000):
        records = records_of(10, seconds)
        pages.append(run_page(records, document_of(records, Window(0, seconds))))
        write_page(tmp_path / "of" / "run.html", pages[-1])
    assert len(pages[1]) < 1.1 * len(pages[0]) < 300_000
    assert (tmp_path / "of" / "run.html").read_text() == pages[1]
