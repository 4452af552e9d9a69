"""Tiny random models that transformers wrote, and changes of their files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": None,
}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "rope_theta": 1000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "factor": 3.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 2.5, 4.0, 7.0],
}


def opt(**facts: Any) -> Any:
    return OPTForCausalLM(OPTConfig(**{**TINY, "ffn_dim": 80, **facts}))


def phi3(**facts: Any) -> Any:
    return Phi3ForCausalLM(Phi3Config(**{**TINY, **facts}))


MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)),
    "llama-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, head_dim=12)
    ),
    "llama-linear": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=LINEAR)),
    "llama-llama3": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=LLAMA3)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, head_dim=10, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "qwen2-yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY, rope_parameters=YARN)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=16)),
    "qwen3-yarn": lambda: Qwen3ForCausalLM(
        Qwen3Config(**TINY, head_dim=16, rope_parameters={**YARN, "truncate": False})
    ),
    "opt": opt,
    "opt-untied": lambda: opt(enable_bias=False, tie_word_embeddings=False),
    "phi3": phi3,
    # The context length is 96: the first model does not extend its original context.
    "phi3-short": lambda: phi3(rope_parameters=dict(LONGROPE), original_max_position_embeddings=96),
    "phi3-long": lambda: phi3(rope_parameters=dict(LONGROPE), original_max_position_embeddings=32),
}


def save_random(name: str, directory: Path, **options: Any) -> Any:
    """Save a model with random weights, including norms and biases."""
    torch.manual_seed(len(name))
    return save_with_noise(MODELS[name](), directory, **options)


def save_with_noise(model: Any, directory: Path, **options: Any) -> Any:
    """Add random numbers to all weights of a new model, and save it."""
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(directory, **options)
    return model


def change_config(directory: Path, **change: Any) -> None:
    """Set values of config.json; ``...`` removes a key."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({k: value for k, value in values.items() if value is not ...}))


def change_weights(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
