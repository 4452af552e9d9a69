"""Tables and report of the serving benchmark."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.harness.bench_documents import results_of
from tests.loadgen.made_runs import HOSTILE
from tests.loadgen.page_content import Content
from tests.programs.serving_bench.report import page, print_tables
from tests.programs.serving_bench.results import merged
from tests.programs.serving_bench.tables import tables


def test_ratios_compare_with_the_first_system_of_a_group() -> None:
    groups = tables(results_of("one", "two"))["Single requests"].groups
    assert groups["512 tokens"] == [
        ["one", "5.12", "10.2", "4.00", "", "", ""],
        ["two", "10.2", "20.5", "8.00", "2.00", "2.00", ""],
    ]
    assert groups["32,000 tokens"][1] == ["two", *["–"] * 5, "too long"]


def test_baseline_can_be_chosen() -> None:
    document = results_of("one", "two") | {"baseline": "two"}
    rows = tables(document)["Single requests"].groups["512 tokens"]
    assert [row[4] for row in rows] == ["0.50", ""]


def test_search_shows_the_last_bracket_and_all_rates() -> None:
    groups = tables(results_of("one", "two", "none"))["Highest rate within objectives"].groups
    (rows,) = groups.values()
    assert rows[0] == [
        "one",
        "11.3",
        "16",
        "",
        "10.7",
        "8: 95.0, 16: 50.0 (ended early), 11.3: 95.0",
    ]
    assert rows[1][3] == "1.00"
    assert rows[2][1:4] == ["–", "16", "–"]


def test_transfer_table_has_stages_and_compression() -> None:
    groups = tables(results_of("one"))["Stages and KV transfer"].groups
    (row,) = groups["2,048 tokens"]
    assert row[1:3] == ["1.00", "12.0"]
    assert row[-3:] == ["32 raw", "256 MiB", "2.000"]


def test_rates_of_mixes_are_compared_at_equal_latency() -> None:
    def row(concurrency: int, latency: float, rate: float) -> dict[str, object]:
        measures = {
            name: {"mean": latency, "p50": latency, "p99": latency}
            for name in ("e2e", "ttft", "tpot", "normalized_latency")
        }
        summary = {
            "measures": measures,
            "throughput": {"requests": rate},
            "outcomes": {"failed": {}, "total": 1},
            "invalid": [],
        }
        shape = {"mix": "imdb", "tokens": 352, "scale": 1.0, "concurrency": concurrency}
        p99 = {"decode-0 headrace_engine_plan_seconds": latency / 100}
        return {**shape, "summary": summary, "p99": p99, "wire_bytes_per_token": 8.0}

    document = results_of("one", "two", "slow")
    curves = (((1, 0.1, 5), (2, 0.2, 8)), ((1, 0.1, 6), (2, 0.3, 10)), ((1, 0.4, 2), (2, 0.5, 3)))
    for system, points in zip(document["systems"], curves, strict=True):
        system["cases"] = {"mixes": [row(*point) for point in points]}
    made = tables(document)
    (equal,) = made["Requests/s of mixes at equal latency"].groups.values()
    assert equal == [["one", "8", "1.00"], ["two", "8", "1.00"], ["slow", "–", "–"]]
    (first, _) = made["Mixes of lengths, closed loop"].groups.values()
    (bytes_and_overhead, _) = made["KV transfer and overhead of mixes"].groups.values()
    assert bytes_and_overhead[1] == ["two", "8", "1.00", "–", "–", "1.0"]
    assert first[1][-5:-1] == ["1.00", "1.00", "1.00", "1.20"]
    assert "equal latency" in page(document)


def test_document_without_rows_has_no_table() -> None:
    document = results_of("one")
    document["systems"][0]["cases"] = {"single": [{"error": "failed"}]}
    document["systems"][0]["error"] = "RuntimeError: no [/GPU]"
    assert not tables(document)
    assert "no [/GPU]" in page(document)
    output = io.StringIO()
    print_tables(document, Console(file=output, width=160))
    assert "no [/GPU]" in output.getvalue()
    assert "single: failed" in output.getvalue()


@pytest.mark.slow
def test_report_is_self_contained_and_escaped() -> None:
    written = page(results_of("one", HOSTILE))
    content = Content(written)
    assert content.tags["script"] == content.tags["img"] == 0
    assert [link for link in content.links if not link.startswith(("#", "data:"))] == []
    assert len(content.ids) == len(set(content.ids))
    assert content.row("one")[0] == "one"
    assert "TTFT, p99, answers of 128 tokens" in written.replace("Time to first token", "TTFT")


def test_merged_documents_keep_their_environments(tmp_path: Path) -> None:
    files = []
    for number, names in enumerate([("one", "two"), ("one",)]):
        document = results_of(*names, rates=(4.0,))
        document["manifest"]["commit"] = f"commit {number}"
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(document))
    systems = merged(files)["systems"]
    assert [system["name"] for system in systems] == ["one", "two", "one (2)"]
    assert [system["manifest"]["commit"] for system in systems] == [
        "commit 0",
        "commit 0",
        "commit 1",
    ]


def test_printed_tables_have_every_system() -> None:
    output = io.StringIO()
    print_tables(results_of("one", "two"), Console(file=output, width=160))
    assert output.getvalue().count("two ") >= 6


def test_cached_prompts_are_compared_with_cold_ones_and_with_the_baseline() -> None:
    table = tables(results_of("a", "b"))["Cached prompts"]
    rows = table.groups["7,900 tokens, the first 7,424 cached"]
    assert rows[0][1:6] == ["400 / 40.0", "500 / 100", "0.100", "0.200", "7,424"]
    assert rows[0][6:8] == ["", ""]
    assert rows[1][6:8] == ["2.00", "2.00"]
    (first, _) = table.groups["32,000 tokens, the first 7,424 cached"]
    assert first[-1] == "too long"
    assert all(len(row) == len(table.columns) for row in (*rows, first))


def test_chats_are_named_in_titles() -> None:
    document = results_of("a", "b")
    for system in document["systems"]:
        for case in ("load", "search"):
            for row in system["cases"][case]:
                row["shape"] = "chats of fixed:8 turns, 2,000 shared tokens"
    made = tables(document)
    shape = "answers of 128 tokens, chats of fixed:8 turns, 2,000 shared tokens"
    assert shape in made["Highest rate within objectives"].groups
    assert f"4 chats/s, {shape}" in made["Poisson load"].groups
