"""Results, their files and tables, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from runtime.checkpoint import write_checkpoint
from runtime.errors import KVFormatError, QualityError
from runtime.offline.quality.__main__ import main
from runtime.offline.quality.fidelity import compare_outputs
from runtime.offline.quality.formats import format_factory
from runtime.offline.quality.measure import Result, describe, measure
from runtime.offline.quality.needles import NeedleScore
from runtime.offline.quality.report import comparison_table, load, result_table, save, tables
from tests.runtime.offline.quality import formats
from tests.runtime.offline.quality.test_needles import byte_tokenizer
from tests.runtime.tiny import CONFIG, prompt_of, tiny_checkpoint, tiny_model

HERE = formats.__name__
BYTES = replace(CONFIG, vocab_size=256, context_length=1200)
TEXTS = torch.tensor([prompt_of(200, seed) for seed in (1, 2)])


def measured(name: str, *, window: bool = True) -> Result:
    spec = name if name == "exact" else f"{HERE}:{name}"
    inputs = describe("tiny", "tiny-0", "random", TEXTS)
    model = tiny_model()
    compressed = format_factory(spec)(CONFIG)
    return measure(model, {spec: compressed}, TEXTS, inputs, window=window)[0]


def text_of(table: Table) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_int8_lies_between_identity_and_two_bits() -> None:
    identity, int8, two_bit = (measured(name) for name in ("Identity", "Int8", "TwoBit"))
    assert identity.quality.kl_mean == identity.quality.kl_p99 == 0
    assert identity.quality.perplexity == identity.dense_perplexity
    assert 0 < int8.quality.kl_mean < two_bit.quality.kl_mean / 10
    assert int8.quality.top1 > two_bit.quality.top1
    assert int8.noise == two_bit.noise  # another kernel with exact KV
    assert int8.noise.kl_mean < int8.quality.kl_mean


def test_window_reduces_the_error() -> None:
    with_window, without = (measured("TwoBit", window=window) for window in (True, False))
    assert with_window.quality.kl_mean < without.quality.kl_mean
    assert (with_window.stored_positions, without.stored_positions) == (2 * 104, 2 * 184)


def test_bytes_per_token_come_from_the_planes() -> None:
    int8 = measured("Int8")
    assert int8.dense_bytes_per_token == 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, dim, bytes
    assert int8.bytes_per_token == 2 * 2 * 2 * (16 + 4)
    assert measured("exact").bytes_per_token == int8.dense_bytes_per_token


def test_result_survives_its_file(tmp_path: Path) -> None:
    result = measured("Int8")
    outputs = compare_outputs([[1, 2]], [[1, 3]], str, prompts_hash="h", max_tokens=2)
    scores = (
        NeedleScore("passkey", 1024, 0, 1, (1, 1, 1, 1, 1), (1, 0, 1, 1, 1)),
        NeedleScore("passkey", 2048, 0, 1, (0, 0, 1, 0, 0), None),
    )
    complete = replace(result, outputs=outputs, outputs_noise=outputs, needles=scores)
    for one in (result, complete):
        save(one, tmp_path / "int8.json")
        assert load(tmp_path / "int8.json") == one


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1}', '{"schema": 2, "x": 2}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(QualityError, match=r"other\.json is not a quality result"):
        load(path)


def test_tables_show_size_and_quality() -> None:
    int8 = measured("Int8")
    shown = text_of(result_table(int8))
    assert "test-int8" in shown
    assert "160 bytes per stored token (1.60x less than bf16)" in shown
    assert f"{int8.quality.kl_mean:.2e}" in shown
    rows = text_of(comparison_table([int8, measured("Identity")])).splitlines()
    found = [line for line in rows if "test-" in line]
    assert "test-identity" in found[0]  # the larger one first
    assert "+0.000%" in found[0]
    assert "1.60x" in found[1]
    assert f"{int8.quality.perplexity_change:+.3%}" in found[1]


def test_results_of_different_texts_are_not_compared() -> None:
    one = measured("Int8")
    other = replace(one, inputs=replace(one.inputs, text_hash="0" * 16, model_hash="other"))
    with pytest.raises(QualityError, match="differ in model_hash, text_hash"):
        comparison_table([one, other])
    renamed = replace(one, inputs=replace(one.inputs, model="path/of/it"))
    assert comparison_table([one, renamed]).row_count == 2


def with_parts(result: Result, found: int, prompts_hash: str = "h") -> Result:
    outputs = compare_outputs([[1, 2]], [[1, 3]], str, prompts_hash=prompts_hash, max_tokens=2)
    scores = (
        NeedleScore("passkey", 1024, 0, 1, (1, 1, 1, 1, 1), (found, 0, 1, 1, 1)),
        NeedleScore("passkey", 2048, 0, 1, (0, 0, 1, 0, 0), None),
    )
    return replace(result, outputs=outputs, needles=scores)


def test_tables_of_outputs_and_retrieval() -> None:
    int8, two_bit = with_parts(measured("Int8"), 1), with_parts(measured("TwoBit"), 0)
    _, outputs, needles = map(text_of, tables([int8, two_bit]))
    assert "0/1" in outputs
    assert "50.0%" in outputs
    first, second = [line for line in needles.splitlines() if "passkey" in line]
    assert "5/5 (1 1 1 1 1)" in first
    assert "4/5 (1 0 1 1 1)" in first
    assert "3/5 (0 0 1 1 1)" in first
    assert "too few" in second
    assert second.count("not counted") == 2
    assert "counted at no length" not in needles
    never = replace(int8, needles=int8.needles[1:])
    assert "passkey counted at no length" in " ".join(text_of(tables([never])[-1]).split())


def test_outputs_and_retrieval_of_other_inputs_are_not_compared() -> None:
    one = with_parts(measured("Int8"), 1)
    with pytest.raises(QualityError, match="different prompts"):
        tables([one, with_parts(one, 1, "other")])
    score = replace(one.needles[0], seed=1)
    with pytest.raises(QualityError, match="different contexts"):
        tables([one, replace(one, needles=(score, *one.needles[1:]))])
    with pytest.raises(QualityError, match="different contexts"):
        tables([one, replace(one, needles=one.needles[:1])])


def test_texts_must_fit_into_the_context() -> None:
    texts = torch.zeros(1, CONFIG.context_length + 1, dtype=torch.int64)
    inputs = describe("tiny", "tiny-0", "zeros", texts)
    with pytest.raises(QualityError, match="expected 2 to 400"):
        measure(tiny_model(), {"exact": None}, texts, inputs)


def test_formats_are_created_by_classes_and_functions() -> None:
    for name in ("Int8", "int8_of"):
        made = format_factory(f"{HERE}:{name}")(CONFIG)
        assert isinstance(made, formats.Int8)
    assert format_factory("exact")(CONFIG) is None


UNKNOWN = {
    "int3": "unknown KV format 'int3': expected exact, fp8, fp8-e5m2, int4, k4v2, stream8, ",
    "no.such:Format": "cannot import 'no.such'",
    f"{HERE}:Missing": "has no 'Missing'",
    f"{HERE}:NotAFormat": "neither a class with create() nor a function",
}


@pytest.mark.parametrize("spec", UNKNOWN)
def test_command_refuses_unknown_formats(
    spec: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the format is checked before the model is loaded")

    monkeypatch.setattr("runtime.offline.quality.__main__.load_checkpoint", loaded)
    assert main(["--format", spec]) == 2
    captured = capsys.readouterr()
    assert UNKNOWN[spec] in captured.err
    assert not captured.out


def test_factory_reports_unsupported_models_and_other_classes() -> None:
    with pytest.raises(KVFormatError, match="head_dim 16 is not supported"):
        format_factory(f"{HERE}:unsupported")(CONFIG)
    with pytest.raises(KVFormatError, match=r"does not extend .*CompressedFormat"):
        format_factory("builtins:repr")(CONFIG)


def test_help_names_the_built_in_formats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "exact, fp8, fp8-e5m2, int4, k4v2, stream8, stream4, stream4-qjl, name:PATH" in shown


def test_command_needs_a_format_or_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "one of --format, --checkpoint and --against is required" in capsys.readouterr().err


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A canonical checkpoint whose tokens are bytes."""
    path = tmp_path / "model"
    path.mkdir()
    write_checkpoint(tiny_checkpoint(config=BYTES), path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def test_command_measures_and_compares(
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out"
    common = ["--model", str(small), "--tokens", "128", "--texts", "2"]
    parts = ["--prompts", "2", "--prompt-tokens", "200", "--output-tokens", "30"]
    parts += ["--lengths", "1100", "1201", "--samples", "1"]
    specs = [f"{HERE}:Int8", f"{HERE}:TwoBit"]
    assert main(["--format", "exact", *specs, *common, *parts, "--out", str(out)]) == 0
    files = [
        out / f"tests.runtime.offline.quality.formats-{name}.json" for name in ("Int8", "TwoBit")
    ]
    int8, two_bit = map(load, files)
    assert (int8.inputs.texts, int8.inputs.tokens) == (2, 128)
    assert int8.window
    assert 0 < int8.quality.kl_mean < 0.01
    assert int8.outputs is not None
    assert two_bit.outputs is not None
    assert (int8.outputs.prompts, int8.outputs.max_tokens) == (2, 30)
    assert two_bit.outputs.mean_token < int8.outputs.mean_token
    assert int8.outputs_noise == two_bit.outputs_noise
    assert [score.found for score in int8.needles] == [None] * 3  # the weights are random
    exact = load(out / "exact.json")
    assert (exact.outputs, exact.needles) == (None, ())
    captured = capsys.readouterr()
    assert "too few" in captured.out
    assert "noise floor" in captured.out
    assert "1201 tokens: skipped" in captured.err
    assert "test-2-bit" in (out / "quality.svg").read_text()
    assert "| test-int8 (Int8) | 160 |" in (out / "quality.md").read_text()
    again = ["--format", f"{HERE}:Int8", *common, "--no-window"]
    assert main([*again, "--against", str(files[0])]) == 0
    assert "no window" in capsys.readouterr().out
    assert main([*again, "--text", "docstrings", "--against", str(files[0])]) == 2
    assert "they differ in text, text_hash" in capsys.readouterr().err
    assert main(["--against", str(files[0]), str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err


def test_command_compares_checkpoints(
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    other, out = tmp_path / "factorized", tmp_path / "out"
    other.mkdir()
    write_checkpoint(tiny_checkpoint(config=BYTES, ranks=(8,) * 7), other)
    arguments = ["--model", str(small), "--tokens", "64", "--texts", "1", "--prompts", "2"]
    arguments += ["--prompt-tokens", "100", "--output-tokens", "5", "--out", str(out)]
    assert main(["--checkpoint", str(other), *arguments]) == 0
    assert "factorized" in capsys.readouterr().out
    dense, factorized = json.loads((out / "checkpoints.json").read_text())
    assert dense["name"] == str(small)
    assert dense["quality"] is None
    assert factorized["quality"]["kl_mean"] > 0
    assert "| fp32, KV in bf16 |" in (out / "checkpoints.md").read_text()
    assert main(["--checkpoint", str(small), *arguments]) == 2
    assert "must be different" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--checkpoint", str(other), "--format", "exact"])
