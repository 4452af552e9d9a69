"""Settings rise: default, file, environment, flag; what is wrong is named."""

from pathlib import Path

import pytest

from services.common.errors import SettingsError
from services.decode.settings import DecodeSettings


def test_sources_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("slots: 9\nport: 5\nmax_running: 3\n")
    monkeypatch.setenv("HEADRACE_DECODE_PORT", "6")
    monkeypatch.setenv("HEADRACE_DECODE_MAX_RUNNING", "4")
    settings = DecodeSettings.load([f"--config={file}", "--max-running", "5"])
    assert (settings.slots, settings.port, settings.max_running) == (9, 6, 5)
    assert settings.codec == "auto"


def test_the_cluster_token_is_one_for_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN", "secret")
    settings = DecodeSettings.load([])
    assert settings.token == "secret"
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "99999"], "port"),
        (["--codec", "zip"], "codec"),
        (["--config", "/no/such/file"], "no settings file"),
        (["--config"], "--config needs a file"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        DecodeSettings.load(arguments)


def test_a_misspelt_key_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("slotz: 9\n")
    with pytest.raises(SettingsError, match="slotz"):
        DecodeSettings.load(["--config", str(file)])


def test_broken_yaml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("slots: [9\n")
    with pytest.raises(SettingsError, match="not YAML"):
        DecodeSettings.load(["--config", str(file)])
