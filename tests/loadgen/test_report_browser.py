"""Layout of reports in browsers: on phones, screens and paper."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.measures import Window
from loadgen.report import compare_page, run_page, sweep_page
from tests.harness.bench_documents import results_of
from tests.loadgen.browser import (
    RenderError,
    View,
    chromium,
    kaleido,
    look_by_chromium,
    look_by_kaleido,
)
from tests.loadgen.made_runs import (
    HOSTILE,
    comparison_of,
    document_of,
    overloaded_sweep_of,
    records_of,
    sweep_of,
)
from tests.programs.serving_bench.report import page as serving_page

VIEWS = (View(360), View(800), View(1400), View(718, print=True))
SERVER = {
    "stages": {"queue": 0.02, "prefill": 0.05, "a stage with quite a long name": 0.004},
    "kv_bytes": {"raw": 3.2e9, "wire": 2.2e9, "ratio": 1.45},
}


def a_run() -> str:
    records = records_of(12, 40, failing=0.1, cancelling=0.1)
    document = document_of(
        records, Window(5, 35), requirements=["ttft:p99<=0.1", "attainment>=0.5"], server=SERVER,
        faults=[{"at": 20.0, "what": "kill prefill " + "x" * 300}],
    )  # fmt: skip
    document["manifest"] |= {"model": HOSTILE, "target": "http://" + "y" * 400}
    return run_page(records, document)


def a_run_of_one() -> str:
    records = records_of(1, 1)
    return run_page(records, document_of(records, Window(0, 30), objectives={}))


def a_saturated_run() -> str:
    """Return the report of a run with latencies from 10 ms to minutes."""
    records = records_of(150, 30, slots=40)
    return run_page(records, document_of(records, Window(0, 30)))


@functools.cache
def sweeps() -> tuple[dict[str, Any], dict[str, Any]]:
    rates = (1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 60.0)
    return sweep_of(rates, seeds=2), sweep_of(rates, seeds=2, slots=16)


def a_sweep() -> str:
    return sweep_page(sweeps()[0])


def an_overloaded_sweep() -> str:
    """Return the report of a sweep with invalid points."""
    return sweep_page(overloaded_sweep_of(sweeps()[0]))


def a_comparison() -> str:
    comparison = comparison_of(*sweeps())
    comparison["b"]["name"] = "disaggregated-with-a-name-" + "z" * 80
    return compare_page(comparison)


def a_serving_bench() -> str:
    return serving_page(results_of("colocated", "1+1 splitzip", "z" * 80))


@pytest.fixture(
    params=[(chromium, look_by_chromium), (kaleido, look_by_kaleido)], ids=["own", "kaleido"]
)
def look(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], list[dict[str, Any]]]:
    where, how = request.param
    path = where()
    if path is None:
        pytest.skip(
            "no Chromium on PATH or in $CHROMIUM" if where is chromium else "no kaleido 0.2.1"
        )
    return lambda page: how(path, page, VIEWS, tmp_path)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("page", "drawings"),
    [
        (a_run, 4),
        (a_run_of_one, 4),
        (a_saturated_run, 4),
        (a_sweep, 6),
        (an_overloaded_sweep, 6),
        (a_comparison, 16),
        (a_serving_bench, 7),
    ],
)
def test_pages_fit_without_overlapping_text(
    look: Callable[[str], list[dict[str, Any]]], page: Callable[[], str], drawings: int
) -> None:
    for seen, view in zip(look(page()), VIEWS, strict=True):
        assert seen["width"] == view.width
        assert seen["wide"] <= view.width
        assert seen["drawings"] == drawings
        assert seen["texts"] >= 8 * drawings
        assert seen["overlapping"] == []
        assert seen["outside"] == []
        assert seen["smallest"] >= 10, "px: text is too small"
        assert seen["scripts"] == seen["images"] == 0


def test_layout_check_detects_overflow_and_overlap(
    look: Callable[[str], list[dict[str, Any]]],
) -> None:
    """The page is too wide, and has overlapping texts and a text outside of its card."""
    texts = (
        '<text x="1" y="20">one</text><text x="9" y="20">two</text><text x="900" y="20">3</text>'
    )
    card = f'<div class="card" style="width: 90px"><svg role="img" width="80">{texts}</svg></div>'
    style = "svg { overflow: visible } main { width: 2000px }"
    page = f"<!DOCTYPE html><style>{style}</style><main>{card}</main>"
    for seen in look(page):
        assert seen["wide"] == 2000 + 8
        assert seen["overlapping"] == ["two / one"]
        assert seen["outside"] == ["3"]


@pytest.mark.skipif(chromium() is None, reason="no Chromium on PATH or in $CHROMIUM")
def test_browser_errors_are_reported(tmp_path: Path) -> None:
    path = chromium()
    assert path is not None
    with pytest.raises(RenderError, match="broken"):
        look_by_chromium(path, "<script>throw new Error('broken')</script>", VIEWS, tmp_path)
