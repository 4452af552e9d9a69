"""Read and write Hugging Face's config.json: the parts common to all model families."""

import math
from collections.abc import Mapping
from typing import Any

from runtime.checkpoint.config_values import count, number, refuse_unsupported, token_ids
from runtime.checkpoint.family import CheckpointFamily, family_of
from runtime.config import ModelConfig, RopeConfig
from runtime.errors import CheckpointError

_ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "frequency_divisors"),
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "finetuned", "mrope_section", "mrope_interleaved"),
)
"""Keys of the rope parameters. The last three do not change the positions of text."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_multiplier", "mlp_multipliers", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "key_multiplier"), (1,)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "lm_head_multiplier", "scale_emb"), (1,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), ()),
    **dict.fromkeys(("scale_depth", "dim_model_base", "attention_chunk_size"), ()),
    **dict.fromkeys(("rope_local_base_freq", "no_rope_layers"), ()),
    **dict.fromkeys(("rotary_pct", "rope_ratio"), (1,)),
    **dict.fromkeys(("no_rope_layer_interval", "num_kv_shared_layers"), (0,)),
    **dict.fromkeys(("alibi", "parallel_attn", "use_parallel_residual"), (False,)),
    **dict.fromkeys(("rope_interleave", "attn_temperature_tuning"), (False,)),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "transformers_weights": (),
}
"""Keys that change the computation of some architecture, each with its values without effect.

A family refuses all other values of a key that it does not support.
"""


def parse_config(hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return a model's shape from ``config.json`` and ``generation_config.json``.

    Raises:
        CheckpointError: a value is missing, malformed or not supported.
    """
    family = family_of_config(hf_config)
    if hf_config.get("quantization_config"):
        raise CheckpointError("quantized Hugging Face checkpoints are not supported")
    return family.parse_config(hf_config, generation)


def family_of_config(hf_config: Mapping[str, Any]) -> CheckpointFamily:
    """Return the family of a ``config.json``. Raises `CheckpointError` if none supports it."""
    return family_of(architecture_of(hf_config))


def architecture_of(hf_config: Mapping[str, Any]) -> str | None:
    """Return the first entry of ``architectures``, or None if there is none."""
    names = hf_config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` from which `parse_config` reads ``config``."""
    return family_of(config.architecture).to_huggingface(config)


def parse_eos(hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of both files.

    Chat models specify the token that ends a turn in ``generation_config.json`` only.
    """
    found = token_ids(hf_config, "eos_token_id") | token_ids(generation, "eos_token_id")
    return tuple(sorted(found))


def parse_context_length(hf_config: Mapping[str, Any]) -> int:
    """Return the context length in tokens.

    With YaRN, it is at least ``factor`` times the original context length, if the config has both.
    If it lacks the original length, ``max_position_embeddings`` may already be the extended one.
    """
    length = count(hf_config, "max_position_embeddings")
    rope = _rope_values(hf_config)
    if _rope_type(rope) == "yarn" and rope.get("factor") is not None:
        original = _original_context(hf_config, rope) or 0
        length = max(length, int(original * number(rope, "factor")))
    return length


def parse_rope(hf_config: Mapping[str, Any]) -> RopeConfig:
    """Return the rotary embedding. Raises `CheckpointError` if its scaling is not supported."""
    rope = _rope_values(hf_config)
    theta = number(rope, "rope_theta", number(hf_config, "rope_theta", 10_000.0))
    divisors = _numbers(rope, "frequency_divisors")
    original = _original_context(hf_config, rope) or count(hf_config, "max_position_embeddings")
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
            context = count(hf_config, "max_position_embeddings")
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
        case "longrope":
            factor = number(rope, "factor", count(hf_config, "max_position_embeddings") / original)
            return RopeConfig(
                theta=theta,
                scaling="longrope",
                factor=factor,
                original_context=original,
                attention_factor=_longrope_attention_factor(rope, factor, original),
                short_factor=_numbers(rope, "short_factor", required_by="longrope"),
                long_factor=_numbers(rope, "long_factor", required_by="longrope"),
            )
        case other:
            raise CheckpointError(f"rope scaling {other!r} is not supported")


def rope_to_huggingface(rope: RopeConfig) -> dict[str, Any]:
    """Return the ``rope_parameters`` from which `parse_rope` reads ``rope``."""
    values: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        values |= {"factor": rope.factor}
    if rope.scaling in ("llama3", "yarn", "longrope"):
        values |= {"original_max_position_embeddings": rope.original_context}
    if rope.scaling == "llama3":
        values |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.scaling == "yarn":
        values |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
            "truncate": rope.truncate,
        }
    if rope.scaling == "longrope":
        values |= {
            "attention_factor": rope.attention_factor,
            "short_factor": list(rope.short_factor),
            "long_factor": list(rope.long_factor),
        }
    if rope.frequency_divisors:
        values |= {"frequency_divisors": list(rope.frequency_divisors)}
    return values


def _rope_values(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``rope_scaling`` or ``rope_parameters`` (transformers 5), empty if both are absent.

    transformers uses ``rope_scaling`` if a config has both.
    """
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError("rope parameters that differ between layers are not supported")
    refuse_unsupported(rope, {"attn_factor": (1,), "extrapolation_factor": (1,)}, _ROPE_KEYS)
    partial = number(rope, "partial_rotary_factor", number(hf_config, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError("rotary embedding of only part of the head is not supported")
    return rope


def _original_context(hf_config: Mapping[str, Any], rope: Mapping[str, Any]) -> int | None:
    """Return the context length before scaling, or None if the config lacks it.

    The key at the top level of the config has priority over the one in ``rope``.
    """
    key = "original_max_position_embeddings"
    stated = (values for values in (hf_config, rope) if values.get(key) is not None)
    return next((count(values, key) for values in stated), None)


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _numbers(rope: Mapping[str, Any], key: str, *, required_by: str = "") -> tuple[float, ...]:
    """Return the numbers under ``key``.

    Args:
        required_by: rope type that requires the key; empty if the key may be absent.
    """
    values = rope.get(key, [])
    if not isinstance(values, list):
        raise CheckpointError(f"{key} in the config must be a list")
    if required_by and not values:
        raise CheckpointError(f"the config has rope type {required_by} without {key}")
    indexed = {str(index): divisor for index, divisor in enumerate(values)}
    return tuple(number(indexed, index) for index in indexed)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cos and sin under YaRN.

    The default is ``0.1 ln(factor) + 1``. With DeepSeek's ``mscale`` keys, it is a quotient of two
    such terms.
    """

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    mscale, all_dim = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)


def _longrope_attention_factor(rope: Mapping[str, Any], factor: float, original: int) -> float:
    """Return the factor of cos and sin under LongRoPE (arXiv 2402.13753, section 3.1).

    The default is ``sqrt(1 + ln(factor) / ln(original))``, or 1 if ``factor`` is at most 1.
    """
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if factor <= 1:
        return 1.0
    if original == 1:
        raise CheckpointError("the config has original_max_position_embeddings = 1")
    return math.sqrt(1 + math.log(factor) / math.log(original))
