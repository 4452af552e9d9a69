"""Terminal tables: width, colours, words and units."""

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console, RenderableType

from loadgen.measures import BY_NAME, Objective, Window
from loadgen.record import Failure
from loadgen.summary import Summary
from loadgen.table import comparison_table, summary_table, sweep_table
from tests.loadgen.made_runs import comparison_of, overloaded_sweep_of, records_of, sweep_of

RATES = (1.0, 5.0, 20.0, 60.0)


def printed(made: Callable[[int], RenderableType], width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    console.print(made(console.width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@functools.cache
def overloaded() -> Summary:
    """Return the summary of a run with latencies of minutes, and failures of all kinds."""
    records = records_of(150, 20, slots=10)
    for number, failure in enumerate(Failure):
        records[number].failure = failure
        records[number].times = []
        records[number].counts = []
    return Summary.of(records, Window(0, 20), [Objective(BY_NAME["ttft"], 0.5)])


@functools.cache
def sweeps() -> tuple[dict[str, Any], dict[str, Any]]:
    return sweep_of(RATES, seeds=2), sweep_of(RATES, seeds=2, slots=12)


def swept() -> dict[str, Any]:
    return sweeps()[0]


def overloaded_sweep() -> dict[str, Any]:
    return overloaded_sweep_of(swept())


def compared(names: tuple[str, str] = ("colocated", "disaggregated")) -> dict[str, Any]:
    comparison = comparison_of(*sweeps())
    for side, name in zip("ab", names, strict=True):
        comparison[side]["name"] = name
    return comparison


@pytest.mark.parametrize(
    "made",
    [
        lambda _: summary_table(overloaded()),
        lambda width: sweep_table(swept(), width),
        lambda width: sweep_table(overloaded_sweep(), width),
        lambda width: comparison_table(compared(), width),
        lambda width: comparison_table(compared(("a" * 60, "b" * 60)), width),
    ],
    ids=["run", "sweep", "overload", "comparison", "long names"],
)
@pytest.mark.parametrize("width", [80, 200])
def test_tables_fit_the_terminal(made: Callable[[int], RenderableType], width: int) -> None:
    lines = printed(made, width).splitlines()
    assert max(map(len, lines)) <= width
    for line in lines:
        assert "…" not in line or "aaa" in line or "disagg" in line, "only long names are shortened"


def test_margins_are_shown_if_they_fit() -> None:
    assert "±" in printed(lambda width: sweep_table(swept(), width), 200)
    narrow = printed(lambda width: sweep_table(swept(), width), 80)
    assert "±" not in narrow
    assert "confidence intervals are in the report" in narrow
    assert "±" in printed(lambda width: comparison_table(compared(), width), 200)


def test_failures_are_in_words_and_red() -> None:
    text = printed(lambda _: summary_table(overloaded()), 400)
    for failure in Failure:
        assert f"1 {failure.words}" in text
    coloured = printed(
        lambda _: summary_table(overloaded()), 400, force_terminal=True, color_system="standard"
    )
    assert f"\x1b[31m1 {Failure.TIMEOUT.words}\x1b[0m" in coloured


def test_invalid_points_have_reason_and_remedy() -> None:
    text = printed(lambda width: sweep_table(overloaded_sweep(), width), 80)
    rows = [line.split() for line in text.splitlines()]
    assert [row[-1] for row in rows if row and row[0] in ("1", "5", "20", "60")] == [
        "knee", "invalid", "invalid", "invalid",
    ]  # fmt: skip
    said = " ".join(text.split())
    assert "Knee at 1 request per second or more: " in said
    assert "At 5 requests per second, in 2 of 2 runs: the load generator was late" in said
    assert said.count("run it on another machine, or lower the rate.") == 1


def test_fractions_are_percentages_and_latencies_ms() -> None:
    text = printed(lambda width: sweep_table(swept(), width), 80)
    titles, units = text.splitlines()[:2]
    by_title = dict(
        zip(titles.split(), units.replace("per second", "1/s").split()[1:], strict=True)
    )
    assert by_title["throughput"] == "1/s"
    assert by_title["ttft:p50"] == by_title["e2e:p50"] == "ms"
    assert by_title["attainment"] == "%"
    assert "attainment, %" in printed(lambda width: comparison_table(compared(), width), 80)


def test_names_are_not_markup() -> None:
    text = printed(lambda width: comparison_table(compared(("[red]a", "[b]")), width), 120)
    assert "Ratios are [b] / [red]a." in text
