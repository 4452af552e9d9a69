"""The GPU's tables, on tiny models and the CPU: they run, and say what they are of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        (["decode", "--context", "20"], ["a copy", "layer by layer", "a graph for each layer"]),
        (["prefill", "--tokens", "20"], ["a product", "20 tokens", "materialized and SDPA"]),
    ],
    ids=["decode", "prefill"],
)
def test_tables_of_a_tiny_model(table: list[str], lines: list[str], tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "runtime.bench", *table]
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


def test_the_table_of_the_host(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "runtime.bench", "host", "--device", "cpu", "--runs", "3"]
    done = subprocess.run(
        [*command, "--streams", "1", "5", "--json", str(target)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(target.read_text())
    assert [figure["streams"] for figure in figures] == [1, 5]
    assert all(figure["step_us"] > 0 and figure["join_us"] > 0 for figure in figures)
