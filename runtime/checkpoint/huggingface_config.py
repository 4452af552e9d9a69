"""Between Hugging Face's config.json and `ModelConfig`, in both directions."""

import math
from collections.abc import Mapping
from typing import Any

from runtime.checkpoint.assemble import Biases
from runtime.checkpoint.facts import count, number, token_ids
from runtime.config import ModelConfig, RopeConfig
from runtime.errors import CheckpointError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128


def parse_config(facts: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """A model's shape from its ``config.json``.

    Sliding-window attention is not computed. Up to the window it equals full attention, so a model
    that uses it (Mistral with a ``sliding_window``, Qwen with ``use_sliding_window``) gets the
    window as its ``context_length``. Under YaRN the context is at least factor x original context.

    Raises `CheckpointError` for what is missing, malformed, or of another architecture.
    """
    architecture = _architecture(facts)
    heads = count(facts, "num_attention_heads")
    hidden = count(facts, "hidden_size")
    kv_heads = count(facts, "num_key_value_heads", heads)
    derived = _QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden // heads
    head_dim = count(facts, "head_dim", derived)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} query heads cannot share {kv_heads} KV heads")
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    return ModelConfig(
        architecture=architecture,
        vocab_size=count(facts, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=count(facts, "intermediate_size"),
        num_layers=count(facts, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=_context_length(facts),
        rms_norm_eps=number(facts, "rms_norm_eps", 1e-6),
        tied_embeddings=facts.get("tie_word_embeddings") is True,
        rope=_parse_rope(facts),
        eos_token_ids=tuple(
            sorted(token_ids(facts, "eos_token_id") | token_ids(generation, "eos_token_id"))
        ),
    )


def parse_biases(facts: Mapping[str, Any]) -> Biases:
    """Which projections have a bias, by architecture and ``attention_bias``/``mlp_bias``."""
    projections: set[str] = set()
    if _architecture(facts) == "Qwen2ForCausalLM":
        projections |= {"q", "k", "v"}
    elif facts.get("attention_bias") is True:
        projections |= {"q", "k", "v", "o"}
    if facts.get("mlp_bias") is True:
        projections |= {"gate", "up", "down"}
    return Biases(frozenset(projections), qk_norm=_architecture(facts) == "Qwen3ForCausalLM")


def to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` that `parse_config` reads back as ``config``."""
    rope = config.rope
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        scaling |= {"factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        scaling |= {"original_max_position_embeddings": rope.original_context}
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.scaling == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
            "truncate": rope.truncate,
        }
    if rope.frequency_divisors:
        scaling |= {"frequency_divisors": list(rope.frequency_divisors)}
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "sliding_window": None,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": scaling,
        "eos_token_id": list(config.eos_token_ids),
    }


def _architecture(facts: Mapping[str, Any]) -> str:
    named = facts.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    if facts.get("quantization_config"):
        raise CheckpointError("quantized Hugging Face checkpoints are not supported")
    if facts.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"activation {facts['hidden_act']!r} is not supported, only 'silu'")
    return str(architecture)


def _context_length(facts: Mapping[str, Any]) -> int:
    length = count(facts, "max_position_embeddings")
    rope = _rope_facts(facts)
    if _rope_type(rope) == "yarn" and rope.get("factor") is not None:
        original = count(rope, "original_max_position_embeddings", length)
        length = max(length, int(original * number(rope, "factor")))
    if _architecture(facts) == "MistralForCausalLM":
        slides = facts.get("sliding_window", _MISTRAL_WINDOW) is not None
    else:
        slides = facts.get("use_sliding_window") is True and "sliding_window" in facts
    return min(length, count(facts, "sliding_window", _MISTRAL_WINDOW)) if slides else length


def _rope_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters`` (since transformers 5) or ``rope_scaling`` with ``rope_theta`` beside."""
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError("rope parameters that differ between layers are not supported")
    if number(rope, "partial_rotary_factor", number(facts, "partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("a rotary embedding over a part of the head is not supported")
    return rope


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _parse_rope(facts: Mapping[str, Any]) -> RopeConfig:
    rope = _rope_facts(facts)
    theta = number(rope, "rope_theta", number(facts, "rope_theta", 10_000.0))
    divisors = _divisors(rope)
    context = count(facts, "max_position_embeddings")
    original = count(
        facts,
        "original_max_position_embeddings",
        count(rope, "original_max_position_embeddings", context),
    )
    match _rope_type(rope):
        case "default":
            return RopeConfig(theta=theta, frequency_divisors=divisors)
        case "linear":
            return RopeConfig(
                theta=theta,
                scaling="linear",
                factor=number(rope, "factor"),
                frequency_divisors=divisors,
            )
        case "llama3":
            return RopeConfig(
                theta=theta,
                scaling="llama3",
                factor=number(rope, "factor"),
                original_context=original,
                low_freq_factor=number(rope, "low_freq_factor"),
                high_freq_factor=number(rope, "high_freq_factor"),
            )
        case "yarn":
            factor = number(rope, "factor", context / original)
            return RopeConfig(
                theta=theta,
                scaling="yarn",
                factor=factor,
                original_context=original,
                beta_fast=number(rope, "beta_fast", 32.0),
                beta_slow=number(rope, "beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(rope, factor),
                truncate=rope.get("truncate", True) is not False,
            )
        case other:
            raise CheckpointError(f"rope scaling {other!r} is not supported")


def _divisors(rope: Mapping[str, Any]) -> tuple[float, ...]:
    given = rope.get("frequency_divisors", [])
    if not isinstance(given, list):
        raise CheckpointError("the config has frequency_divisors that are no list")
    indexed = {str(index): divisor for index, divisor in enumerate(given)}
    return tuple(number(indexed, index) for index in indexed)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's 0.1 ln(factor) + 1, or the quotient of two such with DeepSeek's ``mscale`` keys."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    mscale, all_dim = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
