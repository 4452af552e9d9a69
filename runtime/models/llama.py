"""The Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen3.

A pre-norm layer with RMSNorm, grouped-query attention with RoPE and a SwiGLU MLP. Qwen2 has biases
on q, k and v; Qwen3 has an RMSNorm per query and key head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from runtime.checkpoint.config_values import checked_rope, count, flag, number, refuse_unsupported
from runtime.checkpoint.family import GGUFFormat, LayerLayout, LinearTensor, VectorTensor
from runtime.checkpoint.huggingface_config import (
    architecture_of,
    parse_context_length,
    parse_eos,
    parse_rope,
    rope_to_huggingface,
)
from runtime.checkpoint.weights import LayerWeights
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.models.family import SWIGLU, LayerBuilder, LayerParts, ModelFamily
from runtime.models.llama_config import (
    ARCHITECTURES,
    LLAMA_NEUTRAL,
    Architecture,
    biased_linears,
    window_of,
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
    """The family of Llama, Mistral, Qwen2 and Qwen3 models.

    Attributes:
        known: the properties of each architecture.
    """

    known: ClassVar[Mapping[str, Architecture]] = ARCHITECTURES
    name = "Llama"
    architectures = tuple(ARCHITECTURES)
    layer_type = LayerWeights
    packed_gemm = True
    gguf: ClassVar[GGUFFormat | None] = GGUFFormat(
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
                "q": LinearTensor(
                    PROJECTIONS["q"], queries, hidden, divided="heads", rms_norm="input_norm"
                ),
                "k": LinearTensor(
                    PROJECTIONS["k"], keys, hidden, same_input_as="q", divided="kv_heads"
                ),
                "v": LinearTensor(
                    PROJECTIONS["v"], keys, hidden, same_input_as="q", divided="kv_heads"
                ),
                "o": LinearTensor(
                    PROJECTIONS["o"], hidden, queries, writes_residual=True, divided="heads"
                ),
                "gate": LinearTensor(
                    PROJECTIONS["gate"], inner, hidden, divided="features", rms_norm="post_norm"
                ),
                "up": LinearTensor(
                    PROJECTIONS["up"], inner, hidden, same_input_as="gate", divided="features"
                ),
                "down": LinearTensor(
                    PROJECTIONS["down"], hidden, inner, writes_residual=True, divided="features"
                ),
            },
            vectors={
                "input_norm": VectorTensor("input_layernorm.weight", hidden),
                "post_norm": VectorTensor("post_attention_layernorm.weight", hidden),
                "q_norm": VectorTensor("self_attn.q_norm.weight", config.head_dim, optional=True),
                "k_norm": VectorTensor("self_attn.k_norm.weight", config.head_dim, optional=True),
            },
        )

    def optional_tensors(self, hf_config: Mapping[str, Any]) -> frozenset[str]:
        known = self.known[str(architecture_of(hf_config))]
        biases = {f"{PROJECTIONS[field]}.bias" for field in biased_linears(hf_config, known)}
        norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
        return frozenset(biases | norms if known.qk_norm else biases)

    def parse_config(
        self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        """See `CheckpointFamily`.

        Sliding-window attention is not implemented for this family. It equals full attention for
        sequences within the window, so ``context_length`` is limited to the window of models with
        one.
        """
        architecture = str(architecture_of(hf_config))
        known = self.known[architecture]
        model_type = hf_config.get("model_type", known.model_type)
        if model_type != known.model_type:
            raise CheckpointError(
                f"the config has model_type {model_type!r} and architecture {architecture}, whose "
                f"model_type is {known.model_type!r}"
            )
        refuse_unsupported(hf_config, {**LLAMA_NEUTRAL, "use_qk_norm": (False, known.qk_norm)})
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
            context_length=min(length, window_of(hf_config, known) or length),
            rms_norm_eps=number(hf_config, "rms_norm_eps", 1e-6),
            tied_embeddings=flag(hf_config, "tie_word_embeddings"),
            rope=checked_rope(parse_rope(hf_config), head_dim),
            eos_token_ids=parse_eos(hf_config, generation),
        )

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
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
