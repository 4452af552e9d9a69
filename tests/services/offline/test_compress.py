"""`headrace compress` and `headrace convert`: their results, and a run after an interruption."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from runtime.checkpoint import load_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.encoder import EncoderInput, load_encoder
from runtime.errors import CheckpointError
from runtime.offline import compress as factorization
from services.common.errors import SettingsError
from services.common.model_source import DEFAULT_ENCODER, ENCODER_PACKAGE, resolve_model
from services.offline.compress import compress, is_larger_than
from services.offline.convert import convert
from services.offline.factorize import work_folder
from tests.runtime.encoder.folders import (
    VOCABULARY,
    random_inputs,
    write_encoder,
    write_modules,
)
from tests.runtime.offline.convert.samples import (
    EVEN,
    Rename,
    dobi,
    renamed,
    save_folder,
    svd_llm_v2,
)
from tests.runtime.tiny import tiny_checkpoint
from tests.services.tiny_model import save_tiny_model, save_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "dense")


def test_interrupted_command_continues_and_leaves_only_the_result(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    compress(str(dense), 0.7, whole, rows=2, device="cpu")

    run = factorization.compress

    def interrupted(*arguments: object, **options: object) -> None:
        model, tokens, keep, progress, *others = arguments
        assert callable(progress)
        run(model, tokens, keep, stop_after(progress), *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(factorization, "compress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress(str(dense), 0.7, out, rows=2, device="cpu")
    assert not out.exists()
    assert [path.name for path in work_folder(out).glob("layers-*")] == ["layers-00001.safetensors"]

    monkeypatch.setattr(factorization, "compress", run)
    compress(str(dense), 0.7, out, rows=2, device="cpu")
    assert "continuing" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "whole", "out"}
    assert load_checkpoint(out).model_hash == load_checkpoint(whole).model_hash
    with pytest.raises(SettingsError, match="already exists"):
        compress(str(dense), 0.7, out, rows=2)


def stop_after(progress: Callable[[str, float], None]) -> Callable[[str, float], None]:
    """Return a callback that interrupts when the first layer is finished."""

    def update(stage: str, fraction: float) -> None:
        progress(stage, fraction)
        if stage == "factorizing":
            raise KeyboardInterrupt

    return update


def test_converted_folder_is_loaded(tmp_path: Path) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    save_folder(expected, renamed(expected, svd_llm_v2), tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), tmp_path / "ours", None, "bfloat16")
    made = load_checkpoint(tmp_path / "ours", dtype=None)
    for (_, ours), (_, theirs) in zip(named_tensors(made), named_tensors(expected), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    assert set(json.loads((tmp_path / "ours" / "headrace.json").read_text())["ranks"].values()) == {
        6
    }
    assert (tmp_path / "ours" / "tokenizer.json").is_file()
    with pytest.raises(CheckpointError, match="already a canonical"):
        convert(str(tmp_path / "ours"), tmp_path / "again", None, "auto")


def test_model_larger_than_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint()
    weights = 2 * sum({id(t): t.numel() for _, t in named_tensors(checkpoint)}.values())
    memory = weights
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, memory))
    assert not is_larger_than(torch.device("cuda"), checkpoint)
    memory -= 1
    assert is_larger_than(torch.device("cuda"), checkpoint)
    assert not is_larger_than(torch.device("cpu"), checkpoint)


@pytest.mark.long
def test_compressed_encoder_is_served_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "dense", tmp_path / "out"
    write_encoder(source, "BertModel")
    write_modules(source, {"pooling_mode": "cls"}, normalize=True)
    save_word_tokenizer(source)
    compress(str(source), 0.7, out, "svd-llm", rows=2, device="cpu")
    assert "cosine similarity" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "out"}
    assert (out / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    dense, factorized = load_encoder(source), load_encoder(out)
    assert load_checkpoint(out).keep == 0.7
    found, expected = (each.encode(random_inputs()) for each in (factorized, dense))
    # Both have the pooling and the normalization of modules.json.
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(found)))
    assert 0.3 < torch.cosine_similarity(found, expected).mean() < 1.0


@pytest.mark.parametrize("pickled", [False, True])
def test_converted_encoder_equals_its_source(pickled: bool, tmp_path: Path) -> None:
    source, out = tmp_path / "theirs", tmp_path / "out"
    write_encoder(source, "BertModel")
    write_modules(source, {"pooling_mode": "cls"}, normalize=True)
    save_word_tokenizer(source)
    expected = load_encoder(source).encode(random_inputs(typed=True))
    if pickled:
        weights = source / "model.safetensors"
        torch.save(load_file(weights), source / "pytorch_model.bin")
        weights.unlink()
    convert(str(source), out, None, "auto")
    found = load_encoder(out).encode(random_inputs(typed=True))
    assert torch.equal(found, expected)
    assert (out / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert {path.name for path in out.iterdir()} >= {"modules.json", "1_Pooling", "headrace.json"}
    assert not list(out.glob("*.bin"))


@pytest.mark.parametrize("rename", [svd_llm_v2, dobi])
def test_converted_factor_pairs_of_encoders(rename: Rename, tmp_path: Path) -> None:
    dense, theirs, out = (tmp_path / name for name in ("dense", "theirs", "out"))
    write_encoder(dense, "BertForSequenceClassification", num_labels=1)
    save_word_tokenizer(dense)
    made, _ = factorization.compress(load_checkpoint(dense), torch.ones(2, 8).long(), 0.6)
    save_folder(made, renamed(made, rename), theirs, architecture="BertForSequenceClassification")
    with pytest.raises(CheckpointError, match="headrace convert"):
        load_encoder(theirs)
    with pytest.raises(SettingsError, match="--tokenizer"):
        convert(str(theirs), out, None, "auto")
    convert(str(theirs), out, str(dense), "auto")
    converted = load_checkpoint(out)
    expected = dict(named_tensors(made))
    assert {name for name, _ in named_tensors(converted)} == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in named_tensors(converted))
    assert (out / "tokenizer.json").is_file()


def test_named_tokenizer_replaces_that_of_an_encoder(tmp_path: Path) -> None:
    source, other, out = (tmp_path / name for name in ("source", "other", "out"))
    for folder, pooling in ((source, "cls"), (other, "mean")):
        write_encoder(folder, "BertModel")
        write_modules(folder, {"pooling_mode": pooling}, normalize=True)
        save_word_tokenizer(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"name_or_path": folder.name}))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = "[PAD]"
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "added_tokens.json").write_text(json.dumps({"<source>": 7}))
    convert(str(source), out, str(other), "auto")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_text() == (other / name).read_text()
    assert not (out / "added_tokens.json").exists()
    found = load_encoder(out).encode(random_inputs())
    assert torch.equal(found, load_encoder(source).encode(random_inputs()))
    assert not torch.equal(found, load_encoder(other).encode(random_inputs()))


@pytest.mark.skipif(find_spec(ENCODER_PACKAGE) is None, reason="the encoder is not installed")
def test_default_encoder_is_converted(tmp_path: Path) -> None:
    convert(DEFAULT_ENCODER, tmp_path / "out", None, "auto")
    inputs = [EncoderInput((101, 7592, 2088, 102)), EncoderInput((101, 102))]
    found = load_encoder(tmp_path / "out").encode(inputs)
    assert torch.equal(found, load_encoder(resolve_model(DEFAULT_ENCODER)).encode(inputs))


def test_converted_embedder_keeps_its_modules(dense: Path, tmp_path: Path) -> None:
    """A decoder with modules of sentence-transformers, such as Qwen3-Embedding."""
    write_modules(dense, {"pooling_mode": "lasttoken"}, normalize=True)
    convert(str(dense), tmp_path / "out", None, "auto")
    inputs = random_inputs((1, 5))
    found = load_encoder(tmp_path / "out").encode(inputs)
    assert torch.equal(found, load_encoder(dense).encode(inputs))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))


def test_compressed_embedder_keeps_its_modules(dense: Path, tmp_path: Path) -> None:
    write_modules(dense, {"pooling_mode": "lasttoken"}, normalize=True)
    compress(str(dense), 0.7, tmp_path / "out", rows=2, device="cpu", held_out_chats=0)
    found = load_encoder(tmp_path / "out").encode(random_inputs((1, 5)))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))
    assert load_checkpoint(tmp_path / "out").keep == 0.7


def test_conversion_needs_the_tokenizer_of_an_encoder(tmp_path: Path) -> None:
    for name in ("dense", "other"):
        write_encoder(tmp_path / name, "BertModel")
    with pytest.raises(SettingsError, match=r"other has no tokenizer\.json"):
        convert(str(tmp_path / "dense"), tmp_path / "out", str(tmp_path / "other"), "auto")


def test_encoder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path / "dense", "BertModel")
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        compress(str(tmp_path / "dense"), 0.7, tmp_path / "out", rows=2, device="cpu")


def save_word_tokenizer(folder: Path) -> None:
    """Save a tokenizer of single characters with ``[CLS]`` and ``[SEP]``."""
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *map(chr, range(33, 33 + VOCABULARY - 4))]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_command_computes_on_a_gpu(dense: Path, tmp_path: Path) -> None:
    """In a process of its own, in which CUDA is not initialized before."""
    command = [sys.executable, "-m", "services.cli", "compress", "--model", str(dense)]
    command += ["--keep", "0.7", "--rows", "2", "--chats", "0", "--held-out-chats", "0"]
    command += ["--device", "cuda", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "peak GPU memory" in done.stderr
