"""OPT: learned position embeddings, LayerNorm, biases and an MLP of two linears with ReLU.

The layers are pre-norm. OPT-350M, which is post-norm and projects its embeddings, is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.config_values import count, flag, refuse_unsupported
from runtime.checkpoint.family import (
    LayerLayout,
    LinearTensor,
    StoredParts,
    TensorNames,
    VectorTensor,
)
from runtime.checkpoint.huggingface_config import NEUTRAL, parse_eos
from runtime.checkpoint.weights import Linear
from runtime.config import ModelConfig, RopeConfig
from runtime.errors import CheckpointError
from runtime.models.family import LAYER_NORM, LayerBuilder, LayerParts, ModelFamily

_EPS = 1e-5
"""The epsilon of torch's LayerNorm, which configs cannot change."""
_STORED_POSITIONS, _UNUSED_ROWS = "model.decoder.embed_positions.weight", 2
"""Name of the position embeddings in files, and the number of rows before that of position 0."""


@dataclass(frozen=True)
class OptLayer:
    """Weights of a layer. Norms and their biases are ``[hidden]``."""

    input_norm: Tensor
    input_norm_bias: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    post_norm: Tensor
    post_norm_bias: Tensor
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, kw_only=True)
class OptParts(LayerParts):
    """The callables of a layer."""

    input_norm: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor]
    o: Callable[[Tensor, Tensor], Tensor]
    fc1: Callable[[Tensor], Tensor]
    fc2: Callable[[Tensor, Tensor], Tensor]


class OptFamily(ModelFamily[OptParts]):
    """The family of OPT models."""

    name = "OPT"
    architectures = ("OPTForCausalLM",)
    layer_type = OptLayer
    norm = LAYER_NORM
    tensor_names = TensorNames(
        embedding="model.decoder.embed_tokens.weight",
        final_norm="model.decoder.final_layer_norm.weight",
        layer="model.decoder.layers.{index}.",
        positions="model.decoder.positions.weight",
        final_norm_bias="model.decoder.final_layer_norm.bias",
    )

    def layout(self, config: ModelConfig) -> LayerLayout:
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim

        def reads(name: str, first: str) -> LinearTensor:
            return LinearTensor(name, heads, hidden, same_input_as=first, divided="heads")

        return LayerLayout(
            linears={
                "q": reads("self_attn.q_proj", ""),
                "k": reads("self_attn.k_proj", "q"),
                "v": reads("self_attn.v_proj", "q"),
                "o": LinearTensor(
                    "self_attn.out_proj", hidden, heads, writes_residual=True, divided="heads"
                ),
                "fc1": LinearTensor("fc1", inner, hidden, divided="features"),
                "fc2": LinearTensor("fc2", hidden, inner, writes_residual=True, divided="features"),
            },
            vectors={
                "input_norm": VectorTensor("self_attn_layer_norm.weight", hidden),
                "input_norm_bias": VectorTensor("self_attn_layer_norm.bias", hidden),
                "post_norm": VectorTensor("final_layer_norm.weight", hidden),
                "post_norm_bias": VectorTensor("final_layer_norm.bias", hidden),
            },
        )

    def optional_tensors(self, hf_config: Mapping[str, Any]) -> frozenset[str]:
        if not flag({"enable_bias": True, **hf_config}, "enable_bias"):
            return frozenset()
        linears = self.layout(self.parse_config(hf_config, {})).linears
        return frozenset(f"{linear.name}.bias" for linear in linears.values())

    def stored_parts(self, config: ModelConfig) -> StoredParts:
        positions = (self.tensor_names.positions, config.context_length)
        return {_STORED_POSITIONS: [("", _UNUSED_ROWS), positions]}

    def parse_config(
        self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        if (model_type := hf_config.get("model_type", "opt")) != "opt":
            raise CheckpointError(
                f"the config has model_type {model_type!r} and architecture OPTForCausalLM, whose "
                "model_type is 'opt'"
            )
        hidden, heads = count(hf_config, "hidden_size"), count(hf_config, "num_attention_heads")
        supported = {
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
            "activation_function": ("relu",),
            "word_embed_proj_dim": (hidden,),
        }
        refuse_unsupported(hf_config, {**NEUTRAL, **supported})
        if hidden % heads or hidden // heads % 2:
            raise CheckpointError(f"hidden_size {hidden} is not {heads} heads of an even size")
        return ModelConfig(
            architecture=self.architectures[0],
            vocab_size=count(hf_config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=count(hf_config, "ffn_dim"),
            num_layers=count(hf_config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            context_length=count(hf_config, "max_position_embeddings"),
            rms_norm_eps=_EPS,
            tied_embeddings=flag({"tie_word_embeddings": True, **hf_config}, "tie_word_embeddings"),
            rope=RopeConfig(scaling="none"),
            eos_token_ids=parse_eos(hf_config, generation),
        )

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "architectures": [config.architecture],
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "ffn_dim": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.context_length,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "tie_word_embeddings": config.tied_embeddings,
            "eos_token_id": list(config.eos_token_ids),
        }

    def parts(self, build: LayerBuilder) -> OptParts:
        return OptParts(
            input_norm=build.norm("input_norm", "input_norm_bias"),
            post_norm=build.norm("post_norm", "post_norm_bias"),
            qkv=build.qkv("q", "k", "v"),
            o=build.residual("o"),
            fc1=build.linear("fc1"),
            fc2=build.residual("fc2"),
        )

    def before_attention(
        self, parts: OptParts, hidden: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return parts.input_norm(hidden), (hidden,)

    def after_attention(self, parts: OptParts, attended: Tensor, *carried: Tensor) -> Tensor:
        (hidden,) = carried
        hidden = parts.o(attended, hidden)
        return parts.fc2(functional.relu(parts.fc1(parts.post_norm(hidden))), hidden)


OPT = OptFamily()
