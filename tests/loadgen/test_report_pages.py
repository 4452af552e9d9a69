"""Content of reports: values, escaping, and absence of external resources."""

import functools
import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadgen.files import read_run, write_run
from loadgen.measures import BY_NAME, MEASURES, Window
from loadgen.record import Failure, Record
from loadgen.report import compare_page, run_page, sweep_page
from loadgen.report.palette import NAMES
from tests.loadgen.made_runs import (
    HOSTILE,
    comparison_of,
    document_of,
    overloaded_sweep_of,
    records_of,
    sweep_of,
)
from tests.loadgen.page_content import Content, number

pytestmark = pytest.mark.slow

WINDOW = Window(5, 35)
RATES = (2.0, 8.0, 24.0, 48.0)


def a_run(**more: Any) -> tuple[list[Record], dict[str, Any]]:
    records = records_of(10, 40, failing=0.1, cancelling=0.1)
    asked = ("ttft:p99<=0.001", "attainment>=0.1")
    return records, document_of(records, WINDOW, requirements=asked, **more)


@functools.cache
def pages() -> dict[str, str]:
    sweep = sweep_of(RATES, seeds=2)
    return {
        "run": run_page(*a_run()),
        "sweep": sweep_page(sweep),
        "compare": compare_page(comparison_of(sweep, sweep_of(RATES, seeds=2, slots=12))),
    }


def test_run_report_shows_the_figures_of_its_summary(tmp_path: Path) -> None:
    write_run(tmp_path, *a_run())
    records, document = read_run(tmp_path)
    content = Content(run_page(records, document))
    for measure in MEASURES:
        found = document["measures"][measure.name]
        _, count, *figures = content.row(measure.title)
        assert number(count) == found["count"]
        names = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
        expected = [1e3 * found[name] for name in names]
        assert [number(text) for text in figures] == pytest.approx(expected, rel=6e-3, abs=6e-4)
    throughput, goodput = document["throughput"], document["goodput"]
    for label, figure in (
        ("Requests answered", throughput["requests"]),
        ("Output tokens", throughput["output_tokens"]),
        ("Attainment", 100 * goodput["attainment"]),
        ("Requests in flight", document["in_flight"]["mean"]),
        ("Time to first token, p50", 1e3 * document["measures"]["ttft"]["p50"]),
    ):
        assert number(content.tile(label)[0].split()[0]) == pytest.approx(figure, rel=6e-3)
    assert content.row("ttft:p99<=0.001")[1] == "✗ not met"
    assert content.row("attainment>=0.1")[1] == "✓ met"
    assert content.row("all objectives")[2] == f"{100 * goodput['attainment']:.1f}"


def test_failures_are_shown_in_words_with_an_example() -> None:
    records, document = a_run()
    page = run_page(records, document)
    content = Content(page)
    assert len(document["outcomes"]["failed"]) == 3
    for kind, count in document["outcomes"]["failed"].items():
        row = content.row(Failure(kind).words)
        assert number(row[1]) == count
        assert row[4] == next(r.detail for r in records if r.failure == kind)
        assert f'<span class="bad">{count} {Failure(kind).words}</span>' in page
    failed = sum(document["outcomes"]["failed"].values())
    assert content.tile("Requests failed")[1] == f"{failed} of {document['outcomes']['total']}"


def test_different_answers_are_shown() -> None:
    records = records_of(10, 40)
    example = {"number": 3, "at": 7, "unit": "token", "found": "[1, 2]", "expected": "<b>[1, 3]"}
    check = {
        "reference": "http://other", "equal": 4, "different": 1, "missing": 0,
        "examples": [example],
    }  # fmt: skip
    page = run_page(records, document_of(records, WINDOW, check=check))
    assert "token 7" in page
    assert "&lt;b&gt;[1, 3]" in page
    assert "<b>[1, 3]" not in page


def test_attainment_is_shown_for_each_objective() -> None:
    records = records_of(10, 40)
    document = document_of(records, WINDOW, objectives={"ttft": 0.06, "e2e": 1e-3})
    content = Content(run_page(records, document))
    within = sum(r.times[0] - r.due <= 0.06 for r in WINDOW.due(records))
    rows = [row for row in content.rows if row[0] in ("Time to first token", BY_NAME["e2e"].title)]
    assert [row[1:3] for row in rows[-2:]] == [
        ["60.0", f"{100 * within / len(WINDOW.due(records)):.1f}"],
        ["1.00", "0"],
    ]


@pytest.mark.long
def test_server_metrics_and_faults_are_shown_if_present() -> None:
    server = {
        "stages": {"prefill": 0.03, "decode & more": 0.01},
        "kv_bytes": {"raw": 3 * 2**20, "wire": 2 * 2**20, "ratio": 1.5},
    }
    late = {"at": 14.0, "what": "stop router", "failed": "gone"}
    faults = [{"at": 12.5, "what": "kill <prefill>"}, late]
    page = run_page(*a_run(server=server, faults=faults))
    content = Content(page)
    assert content.row("prefill")[1:] == ["30.0", "75.0"]
    assert content.row("decode & more")[1:] == ["10.0", "25.0"]
    assert content.row("raw")[1] == "3 MiB"
    assert "12.5 s: kill &lt;prefill&gt;<" in page
    assert "14 s: stop router (failed)<" in page
    without = pages()["run"]
    assert "KV transfer" not in without
    assert "Where the time went" not in without


def test_untrusted_text_is_escaped() -> None:
    records, document = a_run(
        server={"stages": {HOSTILE: 0.1}}, faults=[{"at": 6.0, "what": HOSTILE}]
    )
    for record in records:
        record.detail = HOSTILE if record.failure else ""
    document["manifest"] |= {"model": HOSTILE, "arguments": [HOSTILE], HOSTILE: {HOSTILE: HOSTILE}}
    document["invalid"] = HOSTILE
    document["requirements"][HOSTILE] = {"found": None, "met": False}
    sweep = sweep_of((2.0, 4.0), seeds=2)
    sweep["manifest"] |= {"target": HOSTILE}
    sweep["knee"] = {"rate": 2.0, "why": HOSTILE}
    sweep["points"][1] |= {"invalid": HOSTILE, "remedy": HOSTILE}
    comparison = comparison_of(sweep, sweep)
    comparison["a"]["name"] = comparison["b"]["name"] = HOSTILE
    comparison["invalid"] = [HOSTILE]
    odd = comparison["rows"][0] | {"figure": HOSTILE, "title": HOSTILE, "unit": HOSTILE}
    comparison["rows"] += [odd, odd | {"rate": 4.0}]
    run = run_page(records, document)
    for page in (run, sweep_page(sweep), compare_page(comparison)):
        content = Content(page)
        assert content.tags["script"] == content.tags["img"] == content.tags["onerror"] == 0
        assert HOSTILE not in page
        assert HOSTILE in unescape(page)
    assert Content(run).row(Failure.REJECTED.words)[4] == HOSTILE


@pytest.mark.parametrize("kind", ["run", "sweep", "compare"])
def test_reports_are_complete_and_self_contained(kind: str) -> None:
    page = pages()[kind]
    content = Content(page)
    for link in content.links:
        assert link.startswith("#") or link == "data:,"
    assert "url(" not in re.sub(r"url\(#", "", page)
    assert "@import" not in page
    assert content.tags["script"] == 0
    assert {n: c for n, c in Counter(content.ids).items() if c > 1} == {}
    for name in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page):
        assert "".join(name) in content.ids
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len([ElementTree.fromstring(one) for one in drawings]) > 5
    assert "fe00" not in page, "a colour that is none of the style's"
    assert page.count("<h1") == 1
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def luminance(colour: str) -> float:
    """Return the relative luminance as defined by WCAG 2.2."""
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("where", [0, 1, 2], ids=["light", "dark", "paper"])
def test_colours_have_sufficient_contrast(where: int) -> None:
    """WCAG requires a contrast of 4.5 for text and of 3 for graphics."""
    page = "".join(pages().values())
    style = page[page.index("<style>") : page.index("</style>")]
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(blocks) == 3
    colours = dict(re.findall(r"--([a-z]+): #([0-9a-f]+);", blocks[where]))
    assert set(re.findall(r"var\(--([a-z]+)\)", page)) <= set(colours)
    card = luminance(colours["card"])
    for name, least in [("ink", 4.5), ("muted", 4.5), *((n, 3.0) for n in NAMES[4:])]:
        found = sorted((luminance(colours[name]), card))
        assert (found[1] + 0.05) / (found[0] + 0.05) >= least, name


def test_reports_are_reproducible() -> None:
    assert run_page(*a_run()) == pages()["run"]


def test_sweep_report_shows_each_rate_with_intervals() -> None:
    sweep = sweep_of(RATES, seeds=3)
    sweep["points"][3]["invalid"] = "the generator was late"
    content = Content(sweep_page(sweep))
    for point in sweep["points"]:
        row = content.row(f"{point['rate']:g}")
        interval = point["figures"]["ttft:p50"]
        mean, margin = row[3].split("±")
        half = 1e3 * (interval["high"] - interval["low"]) / 2
        assert number(mean) == pytest.approx(1e3 * interval["mean"], rel=6e-3)
        assert number(margin) == pytest.approx(half, abs=0.51)
        assert ("knee" in row[2]) == (point["rate"] == sweep["knee"]["rate"])
        assert ("invalid" in row[2]) == (point["rate"] == 48)
    highest = max(p["figures"]["throughput"]["mean"] for p in sweep["points"][:3])
    most = content.tile("Most requests answered")[0]
    assert number(most.split()[0]) == pytest.approx(highest, 6e-3)


def test_sweep_report_shows_invalid_points_with_reason_and_remedy() -> None:
    """All points but one are invalid: the figures at the top are those of the valid one."""
    sweep = overloaded_sweep_of(sweep_of((1.0, 2.0, 4.0, 8.0), seeds=2))
    page = sweep_page(sweep)
    content = Content(page)
    assert "Knee at 1 request per second or more" in page
    assert content.tile("Knee") == ("1 request per second", "or more")
    assert content.tile("Most requests answered")[1] == "at 1 request per second"
    for point in sweep["points"][1:]:
        assert f"At {point['rate']:g} requests per second, in 2 of 2 runs" in page
        assert point["invalid"] in page
    assert page.count(point["remedy"]) == 1
    plots = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert len(plots) == 6
    assert all("invalid</li>" in plot for plot in plots), "invalid points are drawn and marked"


@pytest.mark.parametrize("count", [1, 2])
def test_counts_have_singular_and_plural(count: int) -> None:
    records = records_of(1, 30)[:count]
    for record in records:
        record.failure = Failure.TIMEOUT
        record.detail = f"message {record.number}"
    page = run_page(records, document_of(records, Window(0, 60), objectives={}))
    assert f"{count} {'request' if count == 1 else 'requests'} due" in page
    assert ("and 1 other message<" in page) == (count == 2)
    assert "1 requests" not in page


def test_each_quantity_has_one_unit() -> None:
    """Latencies are in ms, also those of requirements, which are given in seconds."""
    records = records_of(150, 30, slots=40)
    asked = ("ttft:p99<=2", "attainment>=0.95", "throughput>=1")
    document = document_of(records, Window(0, 30), requirements=asked)
    page = run_page(records, document)
    content = Content(page)
    late, share, rate = (document["requirements"][text]["found"] for text in asked)
    assert late > 2
    assert content.row(asked[0])[2:] == [f"{1e3 * late:,.0f} ms", "at most 2,000 ms"]
    assert content.row(asked[1])[2:] == [f"{100 * share:.1f} %", "at least 95.0 %"]
    assert content.row(asked[2])[2:] == [f"{rate:.1f} per second", "at least 1 per second"]
    assert " / s" not in page
    sweep = sweep_page(sweep_of(RATES, seeds=2))
    assert " / s" not in sweep
    assert "1/s" not in sweep


def test_latencies_over_time_show_when_a_server_falls_behind() -> None:
    page = pages()["run"]
    (timeline,) = re.findall(r"<h2>Over time</h2>.*?</figure>", page, re.DOTALL)
    wide, narrow = re.findall(r"<svg role.*?</svg>", timeline, re.DOTALL)
    for drawing in (wide, narrow):
        for label in ("time to first token, ms", "inter-token latency, ms", "end-to-end latency"):
            assert label in drawing
    assert "of requests by the time at which they were due" in timeline


def test_comparison_report_names_invalid_runs() -> None:
    sweep = sweep_of((2.0, 4.0), seeds=2)
    text = "after is invalid at 2 requests per second, 1 of 2 runs: late."
    page = compare_page(comparison_of(sweep, sweep) | {"invalid": [text]})
    assert text in page


def test_comparison_report_shows_significant_ratios() -> None:
    def row(figure: str, better: str, low: float | None, high: float | None) -> dict[str, Any]:
        one = {"mean": 0.1, "low": 0.09, "high": 0.11, "runs": 3, "level": 0.95}
        mean = 1.2 if low is None or high is None else (low + high) / 2
        ratio = {"mean": mean, "low": low, "high": high, "runs": 3, "level": 0.95}
        return {
            "rate": None, "figure": figure, "title": figure, "unit": "s", "better": better,
            "a": one, "b": one, "ratio": ratio,
        }  # fmt: skip

    rows = [
        row("ttft:p50", "less", 0.7, 0.9),
        row("ttft:p99", "less", 1.1, 1.3),
        row("throughput", "more", 1.1, 1.3),
        row("goodput", "more", 0.7, 0.9),
        row("itl:p50", "less", 0.9, 1.1),
        row("itl:p99", "less", None, None),
        row("e2e:p50", "less", 0.7, 0.9) | {"ratio": None},
    ]
    side = {"name": "one", "manifest": {}}
    content = Content(compare_page({"a": side, "b": side | {"name": "other"}, "rows": rows}))
    said = [row[-1].strip() for row in content.rows[1:] if len(row) == 7]
    assert said == [
        "✓ better", "✗ worse", "✓ better", "✗ worse", "not significant", "one run", "",
    ]  # fmt: skip
    assert content.tile("Better")[0] == content.tile("Worse")[0] == "2"
    assert content.tile("Single runs")[0] == "1"
    assert ["0.800", "0.700 to 0.900"] in [row[3:5] for row in content.rows]
