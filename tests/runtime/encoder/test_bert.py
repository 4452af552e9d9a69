"""BERT, RoBERTa and XLM-RoBERTa against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint import load_checkpoint
from runtime.encoder import Activation, EncoderInput, EncoderTask, load_encoder
from runtime.encoder.batch import RaggedBatch, in_parts
from runtime.errors import CheckpointError, InvalidRequest, RuntimeFault
from runtime.models.build import build_model
from tests.runtime.encoder.folders import (
    SHAPE,
    VOCABULARY,
    peer_inputs,
    random_inputs,
    write_encoder,
)

EMBEDDERS = ("BertModel", "BertForMaskedLM", "RobertaModel", "XLMRobertaForMaskedLM")
CLASSIFIERS = (
    "BertForSequenceClassification",
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
)


def hidden_states(model: Any, each: EncoderInput) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model.base_model(**peer_inputs(each)).last_hidden_state[0]
    return states


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("architecture", EMBEDDERS)
def test_hidden_states_equal_those_of_transformers(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    peer = write_encoder(tmp_path, architecture)
    encoder = load_encoder(tmp_path, backend=backend)
    for typed in (False, True):
        inputs = random_inputs(typed=typed)
        expected = torch.cat([hidden_states(peer, each) for each in inputs])
        with torch.inference_mode():
            hidden = encoder.backbone(RaggedBatch.of(inputs))
        torch.testing.assert_close(hidden, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_activations_equal_those_of_transformers(activation: str, tmp_path: Path) -> None:
    peer = write_encoder(tmp_path, "BertModel", hidden_act=activation)
    (each,) = inputs = random_inputs([20])
    with torch.inference_mode():
        hidden = load_encoder(tmp_path).backbone(RaggedBatch.of(inputs))
    torch.testing.assert_close(hidden, hidden_states(peer, each), rtol=0, atol=2e-5)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_logits_equal_those_of_transformers(architecture: str, labels: int, tmp_path: Path) -> None:
    peer = write_encoder(tmp_path, architecture, num_labels=labels)
    encoder = load_encoder(tmp_path)
    inputs = random_inputs(typed=True)
    with torch.inference_mode():
        expected = torch.cat([peer(**peer_inputs(each)).logits for each in inputs])
    assert encoder.task is EncoderTask.CLASSIFY
    assert encoder.dimension == labels
    torch.testing.assert_close(encoder.encode(inputs), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaForSequenceClassification"])
def test_results_are_bitwise_equal_in_any_batch(architecture: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, architecture)
    encoder = load_encoder(tmp_path)
    inputs = random_inputs(typed=True)
    together = encoder.encode(inputs)
    backwards = encoder.encode(inputs[::-1]).flip(0)
    alone = torch.cat([encoder.encode([each]) for each in inputs])
    assert torch.equal(backwards, together)
    assert torch.equal(alone, together)


def test_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertModel", initializer_range=0.02)
    exact = load_encoder(tmp_path).encode(random_inputs())
    rounded = load_encoder(tmp_path, dtype=torch.bfloat16).encode(random_inputs())
    assert rounded.dtype == torch.float32
    # The tolerance of sentence-transformers' users for bf16.
    assert (1 - torch.cosine_similarity(exact, rounded)).max() < 1e-3


def test_former_tensor_names_are_read(tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertForMaskedLM")
    expected = load_encoder(tmp_path).encode(random_inputs())
    path = tmp_path / "model.safetensors"
    former = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in load_file(path).items()
    }
    save_file(former, path)
    assert torch.equal(load_encoder(tmp_path).encode(random_inputs()), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
        ({"model_type": "roberta"}, "model_type"),
        ({"num_attention_heads": 5}, "5 heads"),
    ],
)
def test_unsupported_configs_are_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_encoder(tmp_path, "BertModel")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        load_encoder(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertModel")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        load_encoder(tmp_path)


def test_unknown_backend_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertModel")
    with pytest.raises(RuntimeFault, match="other"):
        load_encoder(tmp_path, backend="other")


def test_encoder_is_not_served_as_a_decoder(tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertModel")
    with pytest.raises(CheckpointError, match="is an encoder"):
        build_model(load_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (EncoderInput(()), "0 tokens"),
        (EncoderInput((5,) * (SHAPE["max_position_embeddings"] + 1)), "91 tokens"),
        (EncoderInput((5, VOCABULARY)), "below 97"),
        (EncoderInput((5, -1)), "below 97"),
        (EncoderInput((5, 6), (0,)), "1 token types"),
        (EncoderInput((5, 6), (0, 2)), "below 2"),
    ],
)
def test_invalid_inputs_are_refused(wrong: EncoderInput, message: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertModel")
    with pytest.raises(InvalidRequest, match=message):
        load_encoder(tmp_path).encode([EncoderInput((5,)), wrong])


def test_context_excludes_the_unused_positions_of_roberta(tmp_path: Path) -> None:
    write_encoder(tmp_path, "RobertaModel")
    assert load_encoder(tmp_path).max_tokens == SHAPE["max_position_embeddings"] - 2
    assert load_encoder(tmp_path, max_tokens=33).max_tokens == 33
    with pytest.raises(CheckpointError, match="max_tokens"):
        load_encoder(tmp_path, max_tokens=89)


def test_parts_of_a_large_batch_are_bitwise_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_encoder(tmp_path, "BertModel")
    encoder = load_encoder(tmp_path)
    inputs = random_inputs((5, 80, 3, 3, 60, 90, 1))
    expected = encoder.encode(inputs)
    monkeypatch.setattr("runtime.encoder.model.CPU_TOKENS", 70)
    parts = in_parts([len(each.tokens) for each in inputs], 70)
    assert [len(inputs[part]) for part in parts] == [1, 1, 3, 1, 1]
    assert torch.equal(encoder.encode(inputs), expected)


def test_no_inputs_give_no_results(tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertModel")
    assert load_encoder(tmp_path).encode([]).shape == (0, SHAPE["hidden_size"])


@pytest.mark.parametrize(
    ("changes", "labels", "expected"),
    [
        ({}, 1, Activation.SIGMOID),
        ({}, 3, Activation.IDENTITY),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            1,
            "identity",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            3,
            "sigmoid",
        ),
    ],
)
def test_activation_of_cross_encoders(
    changes: dict[str, Any], labels: int, expected: str, tmp_path: Path
) -> None:
    write_encoder(tmp_path, "BertForSequenceClassification", num_labels=labels)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert load_encoder(tmp_path).activation is Activation(expected)


def test_unsupported_activation_of_cross_encoders_is_named(tmp_path: Path) -> None:
    other = {"activation_fn": "torch.nn.modules.activation.Softmax"}
    write_encoder(tmp_path, "BertForSequenceClassification", sentence_transformers=other)
    with pytest.raises(CheckpointError, match="Softmax"):
        load_encoder(tmp_path)
