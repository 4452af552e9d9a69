"""Phi-3: the layer of Llama, with fused projections in its files and LongRoPE.

Files store q, k and v as one matrix, and gate and up as another one.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from runtime.checkpoint.family import StoredParts
from runtime.config import ModelConfig
from runtime.models.llama import PROJECTIONS, LlamaFamily
from runtime.models.llama_config import Architecture

_FUSED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
"""Fused linears in files, each with the fields of the linears that it stacks, in row order."""
_ORIGINAL = "original_max_position_embeddings"
_DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": None, _ORIGINAL: 4096}
"""Defaults of transformers that differ from those of the Llama family."""
_LONGROPE = ("su", "yarn")
"""Names of LongRoPE in the configs of early releases."""


class Phi3Family(LlamaFamily):
    """The family of Phi-3 models."""

    name = "Phi-3"
    known: ClassVar[Mapping[str, Architecture]] = {
        "Phi3ForCausalLM": Architecture(model_type="phi3", window="always")
    }
    architectures = tuple(known)
    gguf = None

    def parse_config(
        self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        given = {key: value for key, value in hf_config.items() if value is not None}
        return super().parse_config(_with_longrope({**_DEFAULTS, **given}), generation)

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        values = super().to_huggingface(config)
        if config.rope.scaling == "longrope":
            values |= {_ORIGINAL: config.rope.original_context}
        return values

    def stored_parts(self, config: ModelConfig) -> StoredParts:
        linears = self.layout(config).linears
        prefixes = [self.tensor_names.layer_prefix(index) for index in range(config.num_layers)]
        return {
            f"{prefix}{whole}.weight": [
                (f"{prefix}{PROJECTIONS[field]}.weight", linears[field].out) for field in fields
            ]
            for prefix in prefixes
            for whole, fields in _FUSED.items()
        }


def _with_longrope(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the current name of LongRoPE, ``longrope``."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf_config.get(key)
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in _LONGROPE:
            hf_config = {**hf_config, key: {**rope, "rope_type": "longrope"}}
    return hf_config


PHI3 = Phi3Family()
