"""Benchmarks run with tiny models on the CPU and print the expected rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.offline.bench.__main__ import TABLES
from runtime.offline.bench.deinfer.tables import TABLES as DEINFER_TABLES
from runtime.parallel.partition import Scheme

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        (["decode", "--context", "20"], ["copy rate", "layer by layer", "a graph for each layer"]),
        (
            ["prefill", "--tokens", "20", "--torch"],
            ["matmul rate", "20 tokens", "backend torch", "materialized and SDPA"],
        ),
    ],
    ids=["decode", "prefill"],
)
def test_decode_and_prefill_benchmarks_run(
    table: list[str], lines: list[str], tmp_path: Path
) -> None:
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "runtime.offline.bench", *table]
    command += ["--shape", "tiny", "--keep", "0.5", "--device", "cpu", "--runs", "1"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--json", str(target)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(target.read_text())
    for wanted, figure in zip(lines, figures, strict=True):
        assert wanted in figure["name"]
    assert all(figure["ms"] > 0 and figure["floor_ms"] > 0 for figure in figures)


def test_mixed_benchmark_runs(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "runtime.offline.bench",
        "mixed",
        "--shape",
        "tiny",
        "--keep",
        "0.5",
    ]
    command += ["--device", "cpu", "--runs", "1", "--cases", "5+2", "--context", "5"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--json", str(target)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (figure,) = json.loads(target.read_text())
    assert "5+2" in figure["name"]
    assert all(figure[f"{part}_ms"] > 0 for part in ("mixed", "chunk", "decode", "floor"))


def test_host_benchmark_runs(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "runtime.offline.bench",
        "host",
        "--device",
        "cpu",
        "--runs",
        "3",
    ]
    done = subprocess.run(
        [*command, "--streams", "1", "5", "--json", str(target)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(target.read_text())
    assert [figure["streams"] for figure in figures] == [1, 5]
    assert all(figure["step_us"] > 0 and figure["join_us"] > 0 for figure in figures)


def test_compress_benchmark_runs(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "runtime.offline.bench",
        "compress",
        "--shape",
        "tiny",
        "--layers",
        "1",
    ]
    command += ["--rows", "2", "--length", "20", "--device", "cpu", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--json", str(target)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    fisher, svd_llm = json.loads(target.read_text())
    assert set(fisher["seconds"]) - set(svd_llm["seconds"]) == {"backward", "head"}
    assert fisher["total_seconds"] > sum(fisher["seconds"].values())  # of two layers
    assert list(tmp_path.iterdir()) == [target]


def test_benchmark_of_ranks_runs(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "runtime.offline.bench", "tp", "--shape", "tiny"]
    command += ["--layers", "1", "--ranks", "2", "--keep", "0.5", "--device", "cpu"]
    command += ["--batch", "1", "--context", "20", "--tokens", "--runs", "1"]
    done = subprocess.run(
        [*command, "--json", str(target)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(target.read_text())
    assert [figure["name"].partition("T = 2, ")[2] for figure in figures] == [
        f"{scheme}, decode, batch 1, context 20{suffix}"
        for scheme in Scheme
        for suffix in ("", ", without communication")
    ]
    elements = [line for line in done.stdout.splitlines() if "elements per token" in line]
    for computed, counted in zip(elements[::2], elements[1::2], strict=True):
        assert computed.replace("computed", "counted") == counted


def test_tables_of_the_deinfer_paper_run(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "runtime.offline.bench", "tp", "--paper", "--shape", "tiny"]
    command += ["--layers", "2", "--ranks", "1", "2", "--divide", "128", "--device", "cpu"]
    command += ["--runs", "1", "--minutes", "4", "--kv-formats", "dense"]
    done = subprocess.run(
        [*command, "--json", str(target)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not measured" not in done.stdout
    tables = json.loads(target.read_text())["tables"]
    assert list(tables) == list(DEINFER_TABLES)
    for name, table in tables.items():
        assert table["rows"], name
        assert all(row["ours"] is not None for row in table["rows"]), name
        assert f"{name}: {table['about']}" in done.stdout


def test_encoder_benchmark_runs(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "runtime.offline.bench", "encoder", "--shape", "tiny"]
    command += ["--device", "cpu", "--runs", "1", "--backends", "naive,sdpa,ours"]
    command += ["--keep", "dense,0.5", "--batch", "2", "--length", "9", "--call-tokens", "18,9"]
    done = subprocess.run(
        [*command, "--json", str(target)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(target.read_text())
    backends = ["naive", "sdpa", "ours 18", "ours 9"]
    expected = [(keep, backend) for keep in ("dense", "0.5") for backend in backends]
    assert [(figure["keep"], figure["backend"]) for figure in figures] == expected
    assert all(figure["ms"] > 0 and figure["cosine"] > 0.999 for figure in figures)
    assert all(f"  {backend} " in done.stdout for backend in backends)


_HELP = """
import sys
sys.modules["triton"] = None  # an import raises ImportError
from runtime.offline.bench.__main__ import TABLES, main

for table in TABLES:
    sys.argv = ["runtime.offline.bench", table, "--help"]
    try:
        main()
    except SystemExit as end:
        print("ended", table, end.code)
"""


def test_help_needs_no_triton() -> None:
    """The CPU builds of torch do not install it."""
    command = [sys.executable, "-c", _HELP]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ended == [f"ended {table} 0" for table in TABLES], done.stderr[-3000:]
