"""Artifacts are made once per model, and again if the model changes or they are damaged."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from services.common.errors import SettingsError
from services.common.interpreter import python_command
from services.local import artifacts
from services.local.artifacts import artifact_folder, prepare
from services.local.options import UpOptions
from services.offline.output import atomic_file
from tests.services.local.lock_holder import hold_elsewhere

pytestmark = pytest.mark.slow


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, str]]:
    """Commands that would have run; each is replaced by writing a small output file."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    run: list[dict[str, str]] = []

    def make(command: str, *arguments: str) -> None:
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        run.append({"command": command, **options})
        out = Path(options["--out"])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("{}")

    monkeypatch.setattr(artifacts, "_make", make)
    return run


def test_model_is_factorized_and_calibrated_once(
    commands: list[dict[str, str]], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("weights")
    options = UpOptions(model=str(model), keep=0.8, device="cpu")
    found = prepare(options, Console(quiet=True))
    assert {one["--device"] for one in commands} == {"cpu"}
    assert [(one["command"], one["--model"]) for one in commands] == [
        ("compress", str(model)),
        ("calibrate", str(found.checkpoint)),
    ]
    assert commands[0]["--keep"] == "0.8"
    assert commands[1]["--tokenizer"] == str(model)
    assert found.served_name == "model-keep0.8"
    assert prepare(options, Console(quiet=True)) == found
    assert len(commands) == 2

    os.utime(model, (1, 1))
    assert prepare(options, Console(quiet=True)).checkpoint != found.checkpoint
    assert len(commands) == 4


def test_unchanged_model_with_raw_codec_needs_no_artifacts(
    commands: list[dict[str, str]], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    for keep in (None, 1.0):
        found = prepare(UpOptions(model=str(model), keep=keep, codec="raw"), Console(quiet=True))
        assert (found.checkpoint, found.codebooks, found.served_name) == (model, None, "model")
    assert not commands


def test_colocated_workers_need_no_codebooks(
    commands: list[dict[str, str]], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    found = prepare(UpOptions(model=str(model), colocated=True), Console(quiet=True))
    assert found.codebooks is None
    assert not commands


def test_failed_command_is_a_settings_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model.gguf"
    model.write_text("no weights")
    with pytest.raises(SettingsError, match="headrace compress"):
        prepare(UpOptions(model=str(model), keep=0.8), Console(quiet=True))


INTERRUPTIBLE = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1]).write_text("interrupted")
"""


@pytest.mark.timeout(60)
def test_ctrl_c_interrupts_the_command_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only this process gets the signal; the command is not in its process group."""
    started = tmp_path / "started"
    monkeypatch.setattr(
        artifacts, "headrace_command", lambda *_: python_command("-c", INTERRUPTIBLE, str(started))
    )

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        artifacts._make("compress")
    assert started.read_text() == "interrupted"


def test_result_of_a_command_is_not_that_of_the_deployment(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        artifacts, "headrace_command", lambda *_: python_command("-c", "print('report')")
    )
    artifacts._make("compress")
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.endswith("report\n")  # after messages of gRPC about the fork, if it is loaded


@pytest.fixture
def dense(tmp_path: Path) -> UpOptions:
    model = tmp_path / "model.gguf"
    model.write_text("weights")
    return UpOptions(model=str(model))


@pytest.mark.parametrize("damage", ["", "{", '{"id": "other"}'])
def test_damaged_codebooks_are_made_again_with_a_warning(
    commands: list[dict[str, str]],
    dense: UpOptions,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    codebooks = prepare(dense, Console(quiet=True)).codebooks
    assert codebooks is not None
    codebooks.write_text(damage)
    assert prepare(dense, Console(stderr=True)).codebooks == codebooks
    assert codebooks.read_text() == "{}"
    assert [one["command"] for one in commands] == ["calibrate", "calibrate"]
    assert "is damaged" in " ".join(capsys.readouterr().err.split())
    prepare(dense, Console(quiet=True))
    assert len(commands) == 2


def test_codebooks_without_a_checksum_are_made_again(
    commands: list[dict[str, str]], dense: UpOptions
) -> None:
    """An earlier version wrote no checksums."""
    codebooks = prepare(dense, Console(quiet=True)).codebooks
    assert codebooks is not None
    codebooks.with_name(f"{codebooks.name}.seal").unlink()
    prepare(dense, Console(quiet=True))
    assert len(commands) == 2


def test_codebooks_are_made_again_if_the_content_of_a_calibration_changes(
    commands: list[dict[str, str]], dense: UpOptions, tmp_path: Path
) -> None:
    calibration, copy = tmp_path / "fdc.safetensors", tmp_path / "copy.safetensors"
    calibration.write_bytes(b"rank 48")
    copy.write_bytes(b"rank 48")
    options = replace(dense, kv_format=f"fdc:{calibration}")
    first = prepare(options, Console(quiet=True)).codebooks
    assert prepare(replace(dense, kv_format=f"fdc:{copy}"), Console(quiet=True)).codebooks == first
    assert len(commands) == 1
    calibration.write_bytes(b"rank 32")
    assert prepare(options, Console(quiet=True)).codebooks != first
    assert [one["--kv-format"] for one in commands] == [f"fdc:{calibration}"] * 2
    assert prepare(replace(dense, kv_format=f"palu:{copy}"), Console(quiet=True)).codebooks != first


def test_missing_calibration_is_a_settings_error(
    commands: list[dict[str, str]], dense: UpOptions
) -> None:
    options = replace(dense, kv_format="kvquant:/no/such/file")
    with pytest.raises(
        SettingsError, match=r"No such file.*headrace calibrate --kv-format kvquant"
    ):
        prepare(options, Console(quiet=True))
    assert not commands


def test_damaged_checkpoint_is_factorized_again_but_one_without_a_checksum_is_kept(
    commands: list[dict[str, str]], dense: UpOptions
) -> None:
    options = replace(dense, keep=0.8, codec="raw")
    checkpoint = prepare(options, Console(quiet=True)).checkpoint
    checkpoint.with_name("checkpoint.seal").unlink()
    prepare(options, Console(quiet=True))
    assert len(commands) == 1
    checkpoint.write_text("truncated")
    prepare(options, Console(quiet=True))
    assert [one["command"] for one in commands] == ["compress", "compress"]


def test_second_start_waits_for_artifacts_of_the_first(
    commands: list[dict[str, str]], dense: UpOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifact_folder(Path(dense.model), None)
    lock = folder.with_name(f"{folder.name}.lock")
    with hold_elsewhere(lock) as first:
        console = Console(quiet=True)
        shown: list[str] = []

        def end_the_first(message: str) -> None:
            shown.append(message)
            first.kill()

        monkeypatch.setattr(console, "print", end_the_first)
        prepare(dense, console)
    assert shown[0].startswith("waiting for artifacts of model")
    assert len(commands) == 1


def test_drafts_of_two_processes_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "codebooks.json"
    with atomic_file(out) as first:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with atomic_file(out) as second:
            assert first != second
            second.write_text("second")
        first.write_text("first")
    assert out.read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


def test_failed_output_leaves_the_file_and_no_draft(tmp_path: Path) -> None:
    out = tmp_path / "codebooks.json"
    out.write_text("before")

    def fail() -> None:
        with atomic_file(out) as draft:
            draft.write_text("half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
