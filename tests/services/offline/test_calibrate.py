"""`headrace calibrate` without a calibrated KV format: codebooks of the codec."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import codec
from services.cli import app
from services.common.errors import SettingsError
from services.offline.calibrate import calibrate
from tests.services.tiny_model import save_tiny_model

ENGLISH = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("calibrate") / "model"))


@pytest.mark.long
def test_codebooks_depend_on_the_text(model: str, tmp_path: Path) -> None:
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "codebooks.json"
    first.write_text(ENGLISH * 300)
    second.write_text("ααααβ " * 2000)
    command = ["calibrate", "--model", model, "--out", str(out), "--text", str(first)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    made = codec.Codebooks.load(out)
    assert made == calibrate(model, model, tmp_path / "same.json", texts=(first,))
    assert made != calibrate(model, model, tmp_path / "other.json", texts=(first, second))


def test_short_text_is_refused(model: str, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(ENGLISH)
    with pytest.raises(SettingsError, match="at least 2048 are needed"):
        calibrate(model, model, tmp_path / "codebooks.json", texts=(short,))
    assert not (tmp_path / "codebooks.json").exists()
