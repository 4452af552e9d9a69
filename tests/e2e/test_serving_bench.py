"""The serving benchmark on a deployment of the packaged model."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


def test_colocated_deployment_is_measured(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "tests.programs.serving_bench", "--systems", "colocated"),
        *("--cases", "single,cached,load", "--lengths", "32", "--repeats", "2", "--shared", "16"),
        *("--rates", "2", "--answers", "4", "--input", "fixed:16", "--seconds", "6"),
        *("--turns", "fixed:2", "--prefix-tokens", "16", "--device", "cpu"),
        *("--warm-up", "0", "--most-lag", "60", "--out", str(tmp_path), "--keep-records"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "results.json").read_text())
    (system,) = document["systems"]
    (single,), (cached,), (load,) = (system["cases"][one] for one in ("single", "cached", "load"))
    assert 0 < single["first"] < single["second"]
    assert cached["ratio"]["first"] > 0
    first, second = load["summary"]["turns"]
    assert first["sent"] >= second["sent"] > 0
    assert first["input_tokens"] == 32
    assert second["input_tokens"] == 32 + 4 + 16, "the tokens of the answer are in the history"
    assert second["cached"]["tokens"] >= second["cached"]["input_tokens"] * 32 / 52
    assert load["summary"]["outcomes"]["succeeded"] > 0
    assert load["metrics"]["decode-0"]["headrace_worker_generation_tokens_total"] > 0
    assert load["stages"]["decode"] > 0
    assert "Poisson load" in (tmp_path / "report.html").read_text()
    assert list(tmp_path.glob("*/records/*/requests.jsonl"))
    assert list(tmp_path.glob("*/decode-0.log"))
    left = [one.pid for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in _line(one)]
    assert not left


def _line(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())
