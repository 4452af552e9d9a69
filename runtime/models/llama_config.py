"""Configs of the Llama family: properties of each architecture, and keys of ``config.json``.

The behaviour is that of the transformers library. A key that transformers ignores for an
architecture is ignored here, too. The exception are keys that change the computation of other
architectures: they may have only values without effect, see
`runtime.checkpoint.huggingface_config.NEUTRAL`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.checkpoint.config_values import count, flag, number
from runtime.checkpoint.huggingface_config import NEUTRAL
from runtime.errors import CheckpointError

_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
"""Defaults of ``sliding_window`` and ``max_window_layers``."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_SILU = ("silu", "swish")
LLAMA_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": _SILU,
    "hidden_activation": _SILU,
    **NEUTRAL,
}
"""`NEUTRAL`, with the names of the family's activation function added."""


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


def biased_linears(hf_config: Mapping[str, Any], known: Architecture) -> tuple[str, ...]:
    """Return the fields of the linears that have a bias."""
    optional = (fields for key, fields in known.biased_if.items() if flag(hf_config, key))
    return known.biased + sum(optional, ())


def window_of(hf_config: Mapping[str, Any], known: Architecture) -> int | None:
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
