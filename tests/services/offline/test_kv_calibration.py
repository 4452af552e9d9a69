"""`headrace calibrate` for compressed KV formats: artifacts, options, text and the search."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime.checkpoint import load_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.errors import QualityError
from runtime.kv.calibration import Artifact
from runtime.kv.registry import create_format
from runtime.offline.quality import search as search_module
from runtime.offline.quality.metrics import Summary
from services.cli import app
from services.common.errors import SettingsError
from services.offline.calibrate_flags import Given, parse_fraction
from services.offline.kv_calibration import calibrate_kv, parse_options
from tests.runtime.offline.convert.samples import save_folder
from tests.runtime.tiny import tiny_checkpoint
from tests.services.tiny_model import save_tokenizer

pytestmark = pytest.mark.slow

FORMATS = ("fdc", "palu", "shard", "kvquant")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated") / "model"
    checkpoint = tiny_checkpoint()
    save_folder(checkpoint, named_tensors(checkpoint), folder)
    save_tokenizer(folder)
    return folder


def run(model: Path, name: str, out: Path, given: Given | None = None) -> Artifact:
    tokens = {"tokens": 1600}
    given = given or Given()
    given = replace(given, text=tokens | dict(given.text))
    return calibrate_kv(str(model), str(model), name, given, out, device="cpu")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORMATS)
def test_written_calibration_is_served_under_its_hash(
    model: Path, name: str, tmp_path: Path
) -> None:
    out = tmp_path / "kv.safetensors"
    artifact = run(model, name, out)
    checkpoint = load_checkpoint(model)
    made = create_format(
        f"{name}:{out}",
        checkpoint.config,
        torch.device("cpu"),
        torch.float32,
        model_hash=checkpoint.model_hash,
    )
    assert (made.name, made.artifact_hash) == (name, artifact.hash)
    again = run(model, name, tmp_path / "again")
    assert again.hash == artifact.hash


def test_command_prints_bytes_ratio_ranks_and_the_name_for_workers(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "kv.safetensors"
    flags = ("--kv-format", "fdc", "--rank", "16", "--tokens", "1600", "--device", "cpu")
    result = CliRunner().invoke(
        app, ["calibrate", "--model", str(model), "--out", str(out), *flags, "--no-prc"]
    )
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "│ 0 │ 128 │ 1.00x │ K 16 16, V 16 16 │" in shown
    assert f"--kv-format fdc:{out}" in shown
    found = Artifact.load(out)
    assert found.options["prc"] is False
    assert found.options["adaptive"] is True
    assert found.hash[:16] in shown


@pytest.mark.parametrize("name", ["fdc", "palu"])
def test_quantized_latents_are_recorded_and_served(model: Path, name: str, tmp_path: Path) -> None:
    given = Given(options={"quantize_bits": 3, "k_outliers": 1, "rank": 16})
    artifact = run(model, name, tmp_path / "kv", given)
    assert artifact.options["kvquant"] == {
        "bits": 3, "k_outliers": 1, "v_outliers": 0, "levels": "kmeans"
    }  # fmt: skip
    checkpoint = load_checkpoint(model)
    made = create_format(
        f"{name}:{tmp_path}/kv",
        checkpoint.config,
        torch.device("cpu"),
        torch.float32,
        model_hash=checkpoint.model_hash,
    )
    assert (made.name, made.artifact_hash) == (f"{name}+kvquant", artifact.hash)


def test_search_evaluates_quantized_latents(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Given(
        options={"quantize_bits": 4}, search={"max_perplexity_increase": 0.5, "evaluations": 1}
    )
    artifact = run(model, "fdc", tmp_path / "kv", given)
    assert artifact.format == "fdc+kvquant"
    # Each of 2 layers and heads: 8 + 8 bytes of codes, a scale of V, 2 outliers of K.
    assert "0.3750: 96 bytes per token" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-format", "shard", "--quantize-bits", "4"), "shard cannot be quantized again"),
        (("--kv-format", "kvquant", "--quantize-bits", "4"), "kvquant cannot be quantized again"),
        (("--kv-format", "int4", "--quantize-bits", "4"), "int4 cannot be quantized again"),
        (("--kv-format", "k4v2", "--quantize-bits", "3"), "k4v2 cannot be quantized again"),
        (("--kv-format", "fp8", "--quantize-bits", "4"), "fp8 cannot be quantized again"),
        (
            ("--kv-format", "fdc", "--k-outliers", "1"),
            "fdc does not support --k-outliers",
        ),
        (("--kv-format", "fdc", "--bits", "3"), "KV format fdc does not support --bits"),
        (("--kv-format", "kvquant", "--rank", "3"), "KV format kvquant does not support --rank"),
        (("--kv-format", "kvquant", "--levels", "x"), "levels 'x' are unknown"),
        (("--kv-format", "fdc", "--step", "1"), "KV format fdc does not support --step"),
        (("--kv-format", "shard", "--no-prc"), "KV format shard does not support --no-prc"),
        (("--kv-format", "shard", "--max-ppl-increase", "1%"), "no removal rate to search"),
        (("--kv-format", "fdc", "--max-ppl-increase", "1%", "--rank", "8"), "omit --rank"),
        (("--kv-format", "fdc", "--evaluations", "3"), "--evaluations needs"),
        (("--kv-format", "fdc", "--text", "none.txt"), "cannot read the calibration text"),
        (("--kv-format", "palu", "--compressed-prefill"), "does not support --compressed-prefill"),
        (("--kv-format", "fdc", "--no-prc", "--compressed-prefill"), "after RoPE: set prc"),
        (
            ("--kv-format", "fdc", "--quantize-bits", "4", "--compressed-prefill"),
            "cannot be combined with --quantize-bits",
        ),
        (("--removal-rate", "0.1"), "KV format dense does not support --removal-rate"),
        (("--tokens", "64"), "KV format dense does not support --tokens"),
        (("--text", "none.txt"), "cannot read the calibration text"),
    ],
)
def test_unsuitable_flags_are_refused(
    model: Path, flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    command = ["calibrate", "--model", str(model), "--out", str(tmp_path / "x"), *flags]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "x").exists()


def test_text_files_replace_the_documentation(model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    second.write_text("Pack my box with five dozen liquor jugs. " * 20)
    made = [
        run(model, "fdc", tmp_path / "out", Given(text={"files": files})).hash
        for files in ((first,), (first, second), ())
    ]
    assert len(set(made)) == 3
    short = tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(SettingsError, match="calibration text is too short"):
        run(model, "fdc", tmp_path / "out", Given(text={"files": (short,)}))


def test_search_writes_the_rate_that_meets_the_constraint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quality is replaced by a function of the bytes: widths are 16 in every case."""
    rates: list[float] = []

    class Limited(search_module.Evaluator):
        def __call__(self, compressed: Any) -> Summary:
            found = super().__call__(compressed)
            return replace(found, perplexity_change=0.02 * (len(rates) % 2))

    def recorded(*arguments: Any) -> float:
        evaluate, *others = arguments

        def counted(rate: float) -> Summary:
            rates.append(rate)
            measured: Summary = evaluate(rate)
            return measured

        return search_module.search_rate(counted, *others)

    monkeypatch.setattr("services.offline.kv_calibration.Evaluator", Limited)
    monkeypatch.setattr("services.offline.kv_calibration.search_rate", recorded)
    given = Given(search={"max_perplexity_increase": 0.01, "evaluations": 4})
    artifact = run(model, "fdc", tmp_path / "out", given)
    # The first and third evaluation miss the constraint: 0.375, 0.1875, 0.28125, 0.234375.
    assert rates == [0.375, 0.1875, 0.28125, 0.234375]
    assert artifact.options["removal_rate"] == 0.234375
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count(": missed") == shown.count(": met") == 2
    assert "removal rate 0.1875: 256 bytes per token, perplexity +0.00%" in shown


def test_search_whose_constraint_is_not_met_writes_nothing(model: Path, tmp_path: Path) -> None:
    given = Given(search={"min_fidelity": 1.0, "max_perplexity_increase": 0.0, "evaluations": 1})
    with pytest.raises(QualityError, match="no removal rate down to"):
        run(model, "fdc", tmp_path / "out", given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.01", 0.01), (" 99.5% ", 0.995)])
def test_percentages(text: str, value: float) -> None:
    assert parse_fraction(text) == pytest.approx(value)


def test_options_have_the_values_of_the_flags() -> None:
    parsed = parse_options("fdc", {"adaptive": False, "rank": None, "removal_rate": 0.3})
    found = parsed.of_format
    assert parsed.codes is None
    assert (found.adaptive, found.rank, found.removal_rate) == (False, None, 0.3)
