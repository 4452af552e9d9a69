"""Tables of the FlashSVD paper, from given figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.offline.bench import encoder
from runtime.offline.bench.flashsvd.rows import Case, Row, Rows
from runtime.offline.bench.flashsvd.tables import TABLES, lines, wanted

MIB = 2**20


def rows_of(scale: float) -> Rows:
    """Return rows of which ours takes a quarter of the time of naive and half of its memory."""
    return {
        name: Row(scale * ms, scale, int(scale * mib) * MIB, 40 * MIB, 50 * MIB, 1.0)
        for name, ms, mib in [
            ("naive", 40.0, 800),
            ("sdpa", 20.0, 500),
            ("flashsvd", 30.0, 410),
            ("ours 64", 10.0, 400),
        ]
    }


def text(name: str) -> list[str]:
    found = {case: rows_of(1 + at) for at, case in enumerate(TABLES[name].cases)}
    return list(TABLES[name].lines(TABLES[name].cases, found))


def test_table_5_has_the_ratios_of_both() -> None:
    table = text("table 5")
    assert len(table) == 2 * (1 + 4)
    ours, paper = next(line for line in table if "ours" in line).split("|")
    assert ours.split()[2:] == ["10.00", "10%", "0.25x", "0.50x", "3200", "400", "0.50x", "0.80x"]
    assert paper.split() == ["22.52", "0.44x", "0.89x", "344", "0.35x", "0.57x"]
    (sdpa,) = (line.split("|")[1] for line in table[:5] if line.startswith("  sdpa"))
    assert sdpa.split() == ["25.33", "0.49x", "1.00x", "605", "0.61x", "1.00x"]


def test_sweeps_divide_ours_by_each_backend() -> None:
    head, *rows = text("figure 9")
    assert head.split() == ["naive", "sdpa", "flashsvd", "ours", "64"]
    assert len(rows) == 4
    assert rows[1].startswith("keep 0.5, 32 x 128")
    assert rows[1].split()[5:] == [
        *("80.00", "1600", "0.25x", "0.50x", "40.00", "1000", "0.50x", "0.80x"),
        *("60.00", "820", "0.33x", "0.98x", "20.00", "800"),
    ]


def test_parts_of_the_memory_add_up() -> None:
    *_, ours = text("figure 12")
    assert ours.split() == ["ours", "64", "40", "50", "310", "40", "50", "710"]


def test_tables_fit_on_a_screen() -> None:
    assert sum(len(text(name)) + 2 for name in TABLES) <= 60


def test_each_model_is_built_once() -> None:
    keeps = [case.keep for case in wanted([*TABLES])]
    changes = [keep for at, keep in enumerate(keeps) if not at or keeps[at - 1] != keep]
    assert len(changes) == len(set(changes))


def test_backends_without_peers_have_no_ratios() -> None:
    rows = {"ours 64": rows_of(1)["ours 64"]}
    head, row = lines(Case("0.5", 32, 512), rows)
    assert head == "keep 0.5, 32 x 512; floor 1.00 ms"
    assert row.split() == ["ours", "64", "10.000", "ms", "400", "MiB", "10.0%", "cosine", "1.00000"]


@pytest.mark.slow
def test_option_paper_measures_the_cases_of_its_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [Case("0.5", 2, 7), Case("full", 1, 7)]
    monkeypatch.setitem(TABLES, "table 5", replace(TABLES["table 5"], cases=cases))
    options = ["--device", "cpu", "--shape", "tiny", "--runs", "1", "--paper", "table 5"]
    options += ["--backends", "naive,ours", "--call-tokens", "14", "--json", str(tmp_path / "x")]
    monkeypatch.setattr("sys.argv", ["bench", *options])
    encoder.main()
    _, title, *rows = filter(None, capsys.readouterr().out.split("\n"))
    assert title.startswith("table 5: ")
    figures = json.loads((tmp_path / "x").read_text())
    measured = [(each["keep"], each["batch"], each["backend"]) for each in figures]
    assert measured == [(*case[:2], name) for case in cases for name in ("naive", "ours 14")]
    assert len(rows) == 2 * (1 + 2)


def test_dense_models_need_a_backend_that_takes_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--keep", "dense", "--backends", "flashsvd15"])
    with pytest.raises(SystemExit):
        encoder.main()
    assert "FlashSVD needs factor pairs" in capsys.readouterr().err
