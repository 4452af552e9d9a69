"""Configs of the Llama family: parsing of ``config.json``, and properties of each architecture.

The behaviour is that of the transformers library. A key that transformers ignores for an
architecture is ignored here, too. The exception are keys that change the computation of other
architectures: they may have only values without effect, see `_NEUTRAL`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.checkpoint.config_values import checked_rope, count, flag, number, refuse_unsupported
from runtime.checkpoint.huggingface_config import (
    architecture_of,
    parse_context_length,
    parse_eos,
    parse_rope,
    rope_to_huggingface,
)
from runtime.config import ModelConfig
from runtime.errors import CheckpointError

_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
"""Defaults of ``sliding_window`` and ``max_window_layers``."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_SILU = ("silu", "swish")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": _SILU,
    "hidden_activation": _SILU,
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
"""For each key that changes the computation of some architecture: its values without effect."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Properties that transformers fixes for an architecture, and defaults of absent config keys.

    Attributes:
        kv_heads: default of ``num_key_value_heads``; None: the number of query heads.
        head_dim: default of ``head_dim``; None: ``hidden_size / num_attention_heads``.
        biased: linears that always have a bias.
        biased_if: maps a config key to the linears that have a bias if the key is true.
        qk_norm: whether query and key heads have a norm.
        window: whether attention is limited to ``sliding_window`` tokens; ``opt-in``: only if
            ``use_sliding_window`` is true.
    """

    model_type: str
    kv_heads: int | None = None
    head_dim: int | None = None
    biased: tuple[str, ...] = ()
    biased_if: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    qk_norm: bool = False
    window: Literal["never", "always", "opt-in"] = "never"


_ATTENTION_BIAS = {"attention_bias": ("q", "k", "v", "o")}
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        model_type="llama", biased_if={**_ATTENTION_BIAS, "mlp_bias": ("gate", "up", "down")}
    ),
    "MistralForCausalLM": Architecture(model_type="mistral", kv_heads=8, window="always"),
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2", kv_heads=32, biased=("q", "k", "v"), window="opt-in"
    ),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        kv_heads=32,
        head_dim=128,
        biased_if=_ATTENTION_BIAS,
        qk_norm=True,
        window="opt-in",
    ),
}


def biased_linears(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of the linears that have a bias."""
    known = ARCHITECTURES[str(architecture_of(hf_config))]
    optional = (fields for key, fields in known.biased_if.items() if flag(hf_config, key))
    return known.biased + sum(optional, ())


def has_qk_norm(hf_config: Mapping[str, Any]) -> bool:
    """Return whether query and key heads have a norm."""
    return ARCHITECTURES[str(architecture_of(hf_config))].qk_norm


def parse_llama(hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """See `CheckpointFamily.parse_config`.

    Sliding-window attention is not implemented for this family. It equals full attention for
    sequences within the window, so ``context_length`` is limited to the window of models with one.
    """
    architecture = str(architecture_of(hf_config))
    known = ARCHITECTURES[architecture]
    model_type = hf_config.get("model_type", known.model_type)
    if model_type != known.model_type:
        raise CheckpointError(
            f"the config has model_type {model_type!r} and architecture {architecture}, whose "
            f"model_type is {known.model_type!r}"
        )
    refuse_unsupported(hf_config, {**_NEUTRAL, "use_qk_norm": (False, known.qk_norm)})
    heads = count(hf_config, "num_attention_heads")
    hidden = count(hf_config, "hidden_size")
    implied = heads if "num_key_value_heads" in hf_config else known.kv_heads or heads
    kv_heads = count(hf_config, "num_key_value_heads", implied)
    head_dim = count(hf_config, "head_dim", known.head_dim or hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} query heads cannot share {kv_heads} KV heads")
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    length = parse_context_length(hf_config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=count(hf_config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=count(hf_config, "intermediate_size"),
        num_layers=count(hf_config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=min(length, _window(hf_config, known) or length),
        rms_norm_eps=number(hf_config, "rms_norm_eps", 1e-6),
        tied_embeddings=flag(hf_config, "tie_word_embeddings"),
        rope=checked_rope(parse_rope(hf_config), head_dim),
        eos_token_ids=parse_eos(hf_config, generation),
    )


def llama_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """See `CheckpointFamily.to_huggingface`."""
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
        "rope_parameters": rope_to_huggingface(config.rope),
        "eos_token_id": list(config.eos_token_ids),
    }


def _window(hf_config: Mapping[str, Any], known: Architecture) -> int | None:
    """Return the tokens of the narrowest attention window, or None if no layer has one."""
    types = hf_config.get("layer_types")
    if types is not None and not (
        isinstance(types, list) and all(kind in _LAYER_TYPES for kind in types)
    ):
        raise CheckpointError(f"layer_types other than {', '.join(_LAYER_TYPES)} are not supported")
    used = {"never": False, "always": True, "opt-in": flag(hf_config, "use_sliding_window")}
    used_window = used[known.window] and hf_config.get("sliding_window", _WINDOW) is not None
    if known.window == "opt-in":
        first = number(hf_config, "max_window_layers", _MAX_WINDOW_LAYERS)
        slides = first < count(hf_config, "num_hidden_layers")
        if types is not None:
            slides = "sliding_attention" in types
            if slides and not used_window:
                raise CheckpointError("layer_types has sliding_attention without a sliding window")
        used_window = used_window and slides
    return count(hf_config, "sliding_window", _WINDOW) if used_window else None
