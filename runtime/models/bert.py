"""BERT and RoBERTa: post-norm encoders with learned positions, LayerNorm and an MLP with GELU.

MiniLM has the architecture of BERT, XLM-RoBERTa that of RoBERTa. `runtime.encoder` computes them:
attention is bidirectional, and the result is one vector for each input.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.config_values import count, number, refuse_unsupported
from runtime.checkpoint.family import (
    LayerLayout,
    LinearTensor,
    StoredParts,
    TensorNames,
    VectorTensor,
)
from runtime.checkpoint.huggingface_config import NEUTRAL, architecture_of
from runtime.checkpoint.weights import Checkpoint, Linear
from runtime.config import EncoderConfig, ModelConfig, RopeConfig
from runtime.errors import CheckpointError
from runtime.models.family import LAYER_NORM, LayerBuilder, LayerParts, ModelFamily

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Supported values of ``hidden_act``, with those of `EncoderConfig.activation`."""
_HIDDEN_ACT = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
_CLASSIFICATION = "ForSequenceClassification"
_LABELS = 2
"""Default number of labels in transformers."""


@dataclass(frozen=True)
class EncoderLayerWeights:
    """Weights of a layer. Norms and their biases are ``[hidden]``.

    Attributes:
        attention_norm, attention_norm_bias: norm of the residual stream after attention.
        up, down: the linears of the MLP.
        output_norm, output_norm_bias: norm of the residual stream after the MLP.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    attention_norm: Tensor
    attention_norm_bias: Tensor
    up: Linear
    down: Linear
    output_norm: Tensor
    output_norm_bias: Tensor


@dataclass(frozen=True, kw_only=True)
class EncoderParts(LayerParts):
    """The callables of a layer.

    Attributes:
        o: output projection of attention ``(attended, hidden)``, added to the residual stream.
        ffn: the MLP, added to its input.
    """

    o: Callable[[Tensor, Tensor], Tensor]
    attention_norm: Callable[[Tensor], Tensor]
    ffn: Callable[[Tensor], Tensor]
    output_norm: Callable[[Tensor], Tensor]


class EncoderFamily(ModelFamily[EncoderParts]):
    """Base of the families of encoders with post-norm layers.

    Attributes:
        root: first component of the tensor names.
        model_types: value of ``model_type`` in config.json for each architecture.
        head: names of the two linears of the classification head, of which the first is followed
            by tanh.
    """

    encoder = True
    layer_type = EncoderLayerWeights
    norm = LAYER_NORM
    root: ClassVar[str]
    model_types: ClassVar[Mapping[str, str]]
    head: ClassVar[tuple[str, str]]

    @property
    def token_types(self) -> str:
        """Name of the token type embeddings."""
        return f"{self.root}.embeddings.token_type_embeddings.weight"

    @property
    def embedding_norm(self) -> str:
        """Name of the norm of the embeddings; its tensors end with ``.weight`` and ``.bias``."""
        return f"{self.root}.embeddings.LayerNorm"

    def layout(self, config: ModelConfig) -> LayerLayout:
        hidden, inner = config.hidden_size, config.intermediate_size
        return LayerLayout(
            linears={
                "q": LinearTensor("attention.self.query", hidden, hidden),
                "k": LinearTensor("attention.self.key", hidden, hidden, same_input_as="q"),
                "v": LinearTensor("attention.self.value", hidden, hidden, same_input_as="q"),
                "o": LinearTensor("attention.output.dense", hidden, hidden, writes_residual=True),
                "up": LinearTensor("intermediate.dense", inner, hidden),
                "down": LinearTensor("output.dense", hidden, inner, writes_residual=True),
            },
            vectors={
                "attention_norm": VectorTensor("attention.output.LayerNorm.weight", hidden),
                "attention_norm_bias": VectorTensor("attention.output.LayerNorm.bias", hidden),
                "output_norm": VectorTensor("output.LayerNorm.weight", hidden),
                "output_norm_bias": VectorTensor("output.LayerNorm.bias", hidden),
            },
        )

    def optional_tensors(self, hf_config: Mapping[str, Any]) -> frozenset[str]:
        linears = self.layout(self.parse_config(hf_config, {})).linears
        return frozenset(f"{linear.name}.bias" for linear in linears.values())

    def more_tensors(self, config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
        encoder = encoder_config(config)
        hidden = config.hidden_size
        found: dict[str, tuple[int, ...]] = {
            self.token_types: (encoder.token_types, hidden),
            f"{self.embedding_norm}.weight": (hidden,),
            f"{self.embedding_norm}.bias": (hidden,),
        }
        if encoder.labels:
            for name, size in zip(self.head, (hidden, encoder.labels), strict=True):
                found |= {f"{name}.weight": (size, hidden), f"{name}.bias": (size,)}
        return found

    def stored_parts(self, config: ModelConfig) -> StoredParts:
        stored = f"{self.root}.embeddings.position_embeddings.weight"
        unused = ("", encoder_config(config).first_position)
        return {stored: [unused, (self.tensor_names.positions, config.context_length)]}

    def parse_config(
        self,
        hf_config: Mapping[str, Any],
        generation: Mapping[str, Any],  # noqa: ARG002 - encoders do not generate
    ) -> EncoderConfig:
        architecture = str(architecture_of(hf_config))
        expected = self.model_types[architecture]
        if (model_type := hf_config.get("model_type", expected)) != expected:
            raise CheckpointError(
                f"the config has model_type {model_type!r} and architecture {architecture}, whose "
                f"model_type is {expected!r}"
            )
        hidden, heads = count(hf_config, "hidden_size"), count(hf_config, "num_attention_heads")
        supported = {
            "is_decoder": (False,),
            "add_cross_attention": (False,),
            "position_embedding_type": ("absolute",),
            "embedding_size": (hidden,),
            "hidden_act": tuple(_ACTIVATIONS),
            "is_causal": (False,),
        }
        refuse_unsupported(hf_config, {**NEUTRAL, **supported})
        if hidden % heads:
            raise CheckpointError(f"hidden_size {hidden} is not divisible by {heads} heads")
        first = self.first_position(hf_config)
        positions = count(hf_config, "max_position_embeddings")
        if positions <= first:
            raise CheckpointError(f"{positions} position embeddings, of which {first} are unused")
        return EncoderConfig(
            architecture=architecture,
            vocab_size=count(hf_config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=count(hf_config, "intermediate_size"),
            num_layers=count(hf_config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            context_length=positions - first,
            rms_norm_eps=number(hf_config, "layer_norm_eps", 1e-12),
            tied_embeddings=True,
            rope=RopeConfig(scaling="none"),
            token_types=count(hf_config, "type_vocab_size", 2),
            first_position=first,
            activation="gelu_tanh" if _activation(hf_config) == "gelu_tanh" else "gelu",
            labels=_labels(hf_config) if architecture.endswith(_CLASSIFICATION) else 0,
        )

    def first_position(self, hf_config: Mapping[str, Any]) -> int:  # noqa: ARG002
        """Return `EncoderConfig.first_position`."""
        return 0

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        encoder = encoder_config(config)
        values = {
            "architectures": [config.architecture],
            "model_type": self.model_types[config.architecture],
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.context_length + encoder.first_position,
            "layer_norm_eps": config.rms_norm_eps,
            "type_vocab_size": encoder.token_types,
            "hidden_act": _HIDDEN_ACT[encoder.activation],
        }
        return values | ({"num_labels": encoder.labels} if encoder.labels else {})

    def parts(self, build: LayerBuilder) -> EncoderParts:
        up, down = build.linear("up"), build.residual("down")
        activation = activation_of(encoder_config(build.config))
        return EncoderParts(
            qkv=build.qkv("q", "k", "v"),
            o=build.residual("o"),
            attention_norm=build.norm("attention_norm", "attention_norm_bias"),
            ffn=lambda x: down(activation(up(x)), x),
            output_norm=build.norm("output_norm", "output_norm_bias"),
        )

    def embedded(self, checkpoint: Checkpoint, hidden: Tensor) -> Tensor:
        """See `ModelFamily`. All tokens have type 0."""
        types, weight, bias = (
            checkpoint.more[name].to(hidden.dtype)
            for name in (
                self.token_types,
                f"{self.embedding_norm}.weight",
                f"{self.embedding_norm}.bias",
            )
        )
        norm = self.norm.plain(weight, checkpoint.config.rms_norm_eps, bias)
        return norm(hidden + types[0])

    def before_attention(
        self,
        parts: EncoderParts,  # noqa: ARG002 - no norm before attention
        hidden: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return hidden, (hidden,)

    def after_attention(self, parts: EncoderParts, attended: Tensor, *carried: Tensor) -> Tensor:
        (hidden,) = carried
        hidden = parts.attention_norm(parts.o(attended, hidden))
        return parts.output_norm(parts.ffn(hidden))


def encoder_config(config: ModelConfig) -> EncoderConfig:
    """Return ``config`` as that of an encoder. Raises `CheckpointError` if it is not one."""
    if not isinstance(config, EncoderConfig):
        raise CheckpointError(f"{config.architecture} is not an encoder")
    return config


def activation_of(config: EncoderConfig) -> Callable[[Tensor], Tensor]:
    """Return the activation of the MLP, differentiable."""
    if config.activation == "gelu":
        return functional.gelu
    return partial(functional.gelu, approximate="tanh")


def _activation(hf_config: Mapping[str, Any]) -> str:
    return _ACTIVATIONS[hf_config.get("hidden_act") or "gelu"]


def _labels(hf_config: Mapping[str, Any]) -> int:
    """Return the number of labels: that of ``id2label``, as in transformers, or ``num_labels``."""
    names = hf_config.get("id2label")
    if names is None:
        return count(hf_config, "num_labels", _LABELS)
    if not isinstance(names, dict) or not names:
        raise CheckpointError("the config has id2label, expected a name for each label")
    return len(names)


def _tensor_names(root: str) -> TensorNames:
    return TensorNames(
        embedding=f"{root}.embeddings.word_embeddings.weight",
        final_norm="",
        lm_head="",
        layer=f"{root}.encoder.layer.{{index}}.",
        positions=f"{root}.embeddings.positions.weight",
        ignored=(f"{root}.embeddings.position_ids", f"{root}.pooler.*", "cls.*", "lm_head.*"),
        former={".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"},
    )


class BertFamily(EncoderFamily):
    """The family of BERT models. A classifier reads the pooled first token."""

    name = "BERT"
    root = "bert"
    model_types: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"),
        "bert",
    )
    architectures = tuple(model_types)
    tensor_names = _tensor_names(root)
    head = ("bert.pooler.dense", "classifier")


class RobertaFamily(EncoderFamily):
    """The family of RoBERTa and XLM-RoBERTa models, whose positions follow the padding token."""

    name = "RoBERTa"
    root = "roberta"
    model_types: ClassVar[Mapping[str, str]] = {
        "RobertaModel": "roberta",
        "RobertaForMaskedLM": "roberta",
        "RobertaForSequenceClassification": "roberta",
        "XLMRobertaModel": "xlm-roberta",
        "XLMRobertaForMaskedLM": "xlm-roberta",
        "XLMRobertaForSequenceClassification": "xlm-roberta",
    }
    architectures = tuple(model_types)
    tensor_names = _tensor_names(root)
    head = ("classifier.dense", "classifier.out_proj")

    def first_position(self, hf_config: Mapping[str, Any]) -> int:
        value = hf_config.get("pad_token_id", 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"the config has pad_token_id = {value!r}, expected a token id")
        return value + 1

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        first = encoder_config(config).first_position
        return {**super().to_huggingface(config), "pad_token_id": first - 1}


BERT = BertFamily()
ROBERTA = RobertaFamily()
