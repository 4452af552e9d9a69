"""Decoders as embedders, against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from runtime.checkpoint import write_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.checkpoint.load import load_checkpoint
from runtime.encoder import Encoder, EncoderTask, decoder, load_encoder
from runtime.errors import CheckpointError, InvalidRequest
from runtime.offline.convert import convert
from tests.runtime.encoder.folders import (
    VOCABULARY,
    peer_inputs,
    random_inputs,
    write_modules,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model of the shape of Qwen3-Embedding."""
    made = tmp_path_factory.mktemp("qwen3-embedding")
    transformers.set_seed(0)
    transformers.logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).base_model.save_pretrained(made)
    # The config of Qwen3-Embedding names the architecture with a head, which its files lack.
    path = made / "config.json"
    saved = {**json.loads(path.read_text()), "architectures": ["Qwen3ForCausalLM"]}
    path.write_text(json.dumps(saved))
    write_modules(made, {"pooling_mode_lasttoken": True}, normalize=True)
    return made


def copied(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy a folder, and change its config."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return target


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_encoder(folder)


def test_embeddings_equal_those_of_transformers(folder: Path, encoder: Encoder) -> None:
    peer: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for each in random_inputs():
        arguments = peer_inputs(each)
        del arguments["token_type_ids"]
        with torch.inference_mode():
            rows.append(peer(**arguments).last_hidden_state[0, -1])
    expected = functional.normalize(torch.stack(rows))
    found = encoder.encode(random_inputs())
    assert encoder.task is EncoderTask.EMBED
    assert encoder.backend == "paged"
    # Decoders round K and V to bf16.
    assert (1 - torch.cosine_similarity(found, expected)).max() < 1e-4


def test_passes_over_short_inputs_are_bounded_in_pages(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each input needs whole pages of 16 tokens, so that a batch of short ones needs many."""
    inputs = [*random_inputs((3,) * 7), *random_inputs((40, 2, 100))]
    expected = encoder.encode(inputs)
    monkeypatch.setattr(decoder, "_PASS_PAGES", 3)
    other = load_encoder(folder)
    assert isinstance(other.backbone, decoder.DecoderBackbone)
    assert torch.equal(other.encode(inputs[:9]), expected[:9])
    assert other.backbone._pages == 3
    assert torch.equal(other.encode(inputs), expected)
    assert other.backbone._pages == 7, "the longest input is a pass of its own"


WITHOUT_HEAD = [
    {"architectures": ["Qwen3Model"]},
    {"architectures": ["Qwen3Model"], "tie_word_embeddings": False},
    {"tie_word_embeddings": False},  # as in Qwen3-Embedding-8B
]
"""Configs of models whose files are known to lack an LM head."""


@pytest.mark.parametrize("changes", WITHOUT_HEAD)
def test_config_may_name_a_model_with_or_without_head(
    folder: Path, encoder: Encoder, tmp_path: Path, changes: dict[str, Any]
) -> None:
    changed = copied(folder, tmp_path / "changed", **changes)
    assert torch.equal(
        load_encoder(changed).encode(random_inputs()), encoder.encode(random_inputs())
    )
    assert not load_checkpoint(changed).has_lm_head


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("changes", WITHOUT_HEAD)
def test_converted_embedder_has_no_lm_head(
    folder: Path, tmp_path: Path, changes: dict[str, Any], pickled: bool
) -> None:
    changed = copied(folder, tmp_path / "changed", **changes)
    expected = load_checkpoint(changed)
    if pickled:
        weights = changed / "model.safetensors"
        torch.save(load_file(weights), changed / "pytorch_model.bin")
        weights.unlink()
    converted, _ = convert(changed)
    assert not converted.has_lm_head
    write_checkpoint(converted, tmp_path / "out")
    found = load_checkpoint(tmp_path / "out")
    assert not found.has_lm_head
    assert found.config == expected.config
    for (name, ours), (other, theirs) in zip(
        named_tensors(found), named_tensors(expected), strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs)


def test_converted_model_with_lm_head_has_it(folder: Path, tmp_path: Path) -> None:
    (copied(folder, tmp_path / "changed") / "modules.json").unlink()
    converted, _ = convert(tmp_path / "changed")
    write_checkpoint(converted, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").has_lm_head


def test_conversion_of_a_folder_that_lacks_the_head_is_an_error(
    folder: Path, tmp_path: Path
) -> None:
    changed = copied(folder, tmp_path / "changed", tie_word_embeddings=False)
    (changed / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        convert(changed)


def test_head_that_another_folder_lacks_is_an_error(folder: Path, tmp_path: Path) -> None:
    changed = copied(folder, tmp_path / "changed", tie_word_embeddings=False)
    (changed / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        load_checkpoint(changed)


def test_embeddings_are_bitwise_equal_in_any_batch(encoder: Encoder) -> None:
    inputs = random_inputs()
    together = encoder.encode(inputs)
    assert torch.equal(torch.cat([encoder.encode([each]) for each in inputs]), together)
    assert torch.equal(encoder.encode(inputs[::-1]).flip(0), together)


def test_last_token_is_the_default_pooling(folder: Path, encoder: Encoder, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    found = functional.normalize(load_encoder(tmp_path).encode(random_inputs()))
    torch.testing.assert_close(found, encoder.encode(random_inputs()))


def test_token_types_are_refused(encoder: Encoder) -> None:
    with pytest.raises(InvalidRequest, match="token types"):
        encoder.encode(random_inputs([4], typed=True))
