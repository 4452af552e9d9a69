"""``headrace tune`` on a machine that pretends to have a GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from runtime.checkpoint import Checkpoint, write_checkpoint
from runtime.gemm.plan import KernelPlan
from runtime.offline.bench import plan as bench
from services.cli import app
from services.common.errors import SettingsError
from services.offline import tune as command
from tests.runtime.tiny import tiny_checkpoint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_checkpoint(tiny_checkpoint(), tmp_path / "model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "unsupported_by_gemm", lambda *_: None)
    return tmp_path / "model"


def test_tune_measures_the_given_numbers_of_ranks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Sequence[int]] = []

    def measure(_: Checkpoint, sizes: Sequence[int], log: Callable[[str], None]) -> KernelPlan:
        log("a line")
        measured.append(tuple(sizes))
        return KernelPlan({"a": None}, device="a GPU")

    monkeypatch.setattr(bench, "measure", measure)
    out = tmp_path / "plan.json"
    for flags in ([], ["--tp", "1", "--tp", "2"]):
        done = CliRunner().invoke(app, ["tune", "--model", str(model), "--out", str(out), *flags])
        assert done.exit_code == 0, done.output
        assert KernelPlan.load(out).hash in done.output
    assert measured == [(1,), (1, 2)]


def test_more_ranks_than_heads_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="only 6 query heads"):
        command.tune(str(model), tmp_path / "plan.json", (1, 7))
    assert not (tmp_path / "plan.json").exists()
