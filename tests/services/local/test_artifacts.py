"""What a deployment needs is made once for each model, and made anew when the model changes."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from services.common.errors import SettingsError
from services.local import artifacts
from services.local.artifacts import prepare
from services.local.options import UpOptions


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, str]]:
    """The commands that are run, in place of which an empty file is written."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    commands: list[dict[str, str]] = []

    def make(command: str, *arguments: str) -> None:
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        commands.append({"command": command, **options})
        out = Path(options["--out"])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()

    monkeypatch.setattr(artifacts, "_make", make)
    return commands


def test_a_model_is_factorized_and_its_codec_calibrated_once(
    made: list[dict[str, str]], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("weights")
    options = UpOptions(model=str(model), keep=0.8)
    found = prepare(options, Console(quiet=True))
    assert [(one["command"], one["--model"]) for one in made] == [
        ("compress", str(model)),
        ("calibrate", str(found.checkpoint)),
    ]
    assert made[0]["--keep"] == "0.8"
    assert made[1]["--tokenizer"] == str(model)
    assert found.served_name == "model-keep0.8"
    assert prepare(options, Console(quiet=True)) == found
    assert len(made) == 2

    os.utime(model, (1, 1))
    assert prepare(options, Console(quiet=True)).checkpoint != found.checkpoint
    assert len(made) == 4


def test_a_model_that_is_served_as_it_is(made: list[dict[str, str]], tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    for keep in (None, 1.0):
        found = prepare(UpOptions(model=str(model), keep=keep, codec="raw"), Console(quiet=True))
        assert (found.checkpoint, found.codebooks, found.served_name) == (model, None, "model")
    assert not made


def test_what_cannot_be_made_is_a_settings_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model.gguf"
    model.write_text("no weights")
    with pytest.raises(SettingsError, match="headrace compress"):
        prepare(UpOptions(model=str(model), keep=0.8), Console(quiet=True))
