"""The Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen3.

A pre-norm layer with RMSNorm, grouped-query attention with RoPE and a SwiGLU MLP. Qwen2 has biases
on q, k and v; Qwen3 has an RMSNorm per query and key head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from runtime.checkpoint.family import GGUFFormat, LayerLayout, LinearTensor, VectorTensor
from runtime.checkpoint.weights import LayerWeights
from runtime.config import ModelConfig
from runtime.models.family import SWIGLU, LayerBuilder, LayerParts, ModelFamily
from runtime.models.llama_config import (
    ARCHITECTURES,
    biased_linears,
    has_qk_norm,
    llama_to_huggingface,
    parse_llama,
)

PROJECTIONS: dict[str, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Hugging Face's module name within a layer, for each linear of `LayerWeights`."""


@dataclass(frozen=True, kw_only=True)
class LlamaParts(LayerParts):
    """The callables of a Llama layer; ``gated`` computes ``SiLU(gate) * up``."""

    input_norm: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor]
    o: Callable[[Tensor, Tensor], Tensor]
    gated: Callable[[Tensor], Tensor]
    down: Callable[[Tensor, Tensor], Tensor]


class LlamaFamily(ModelFamily[LlamaParts]):
    """The family of Llama, Mistral, Qwen2 and Qwen3 models."""

    name = "Llama"
    architectures = tuple(ARCHITECTURES)
    layer_type = LayerWeights
    packed_gemm = True
    gguf: ClassVar[GGUFFormat] = GGUFFormat(
        general_architecture="llama",
        architecture="LlamaForCausalLM",
        layer_names={
            "input_norm": "attn_norm.weight",
            "post_norm": "ffn_norm.weight",
            "q": "attn_q",
            "k": "attn_k",
            "v": "attn_v",
            "o": "attn_output",
            "gate": "ffn_gate",
            "up": "ffn_up",
            "down": "ffn_down",
        },
        interleaved={"q": "num_heads", "k": "num_kv_heads"},
    )

    def layout(self, config: ModelConfig) -> LayerLayout:
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        return LayerLayout(
            linears={
                "q": LinearTensor(PROJECTIONS["q"], queries, hidden),
                "k": LinearTensor(PROJECTIONS["k"], keys, hidden, same_input_as="q"),
                "v": LinearTensor(PROJECTIONS["v"], keys, hidden, same_input_as="q"),
                "o": LinearTensor(PROJECTIONS["o"], hidden, queries, writes_residual=True),
                "gate": LinearTensor(PROJECTIONS["gate"], inner, hidden),
                "up": LinearTensor(PROJECTIONS["up"], inner, hidden, same_input_as="gate"),
                "down": LinearTensor(PROJECTIONS["down"], hidden, inner, writes_residual=True),
            },
            vectors={
                "input_norm": VectorTensor("input_layernorm.weight", hidden),
                "post_norm": VectorTensor("post_attention_layernorm.weight", hidden),
                "q_norm": VectorTensor("self_attn.q_norm.weight", config.head_dim, optional=True),
                "k_norm": VectorTensor("self_attn.k_norm.weight", config.head_dim, optional=True),
            },
        )

    def optional_tensors(self, hf_config: Mapping[str, Any]) -> frozenset[str]:
        biases = {f"{PROJECTIONS[field]}.bias" for field in biased_linears(hf_config)}
        norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
        return frozenset(biases | norms if has_qk_norm(hf_config) else biases)

    def parse_config(
        self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        return parse_llama(hf_config, generation)

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        return llama_to_huggingface(config)

    def parts(self, build: LayerBuilder) -> LlamaParts:
        head_norms = None
        if build.has("q_norm"):
            head_norms = build.norm("q_norm"), build.norm("k_norm")
        return LlamaParts(
            input_norm=build.norm("input_norm"),
            post_norm=build.norm("post_norm"),
            qkv=build.qkv("q", "k", "v"),
            o=build.residual("o"),
            gated=build.gated("gate", "up", SWIGLU),
            down=build.residual("down"),
            head_norms=head_norms,
        )

    def before_attention(
        self, parts: LlamaParts, hidden: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return parts.input_norm(hidden), (hidden,)

    def after_attention(self, parts: LlamaParts, attended: Tensor, *carried: Tensor) -> Tensor:
        (hidden,) = carried
        hidden = parts.o(attended, hidden)
        return parts.down(parts.gated(parts.post_norm(hidden)), hidden)


LLAMA = LlamaFamily()
