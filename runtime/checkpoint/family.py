"""Checkpoints of model families: configs, tensor names, and the registry of families.

A family covers architectures that share a decoder layer, such as Llama, Mistral and Qwen. Readers,
writers and converters support every registered family through `CheckpointFamily`.
`runtime.models.family.ModelFamily` adds the forward pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, ClassVar

from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.parallel.partition import Divided

ENTRY_POINTS = "headrace.models"
"""Entry-point group for families of other packages; each value is a family object."""
_BUILT_IN = (
    "runtime.models.bert:BERT",
    "runtime.models.bert:ROBERTA",
    "runtime.models.llama:LLAMA",
    "runtime.models.opt:OPT",
    "runtime.models.phi3:PHI3",
)
"""Families of this package, named as strings because their modules import this one."""


@dataclass(frozen=True)
class LinearTensor:
    """One linear of a decoder layer, as a checkpoint stores it.

    Attributes:
        name: module name within a decoder layer. The tensors are ``{name}.weight`` ``[out, inner]``
            and optionally ``{name}.bias`` ``[out]``.
        out, inner: output and input size.
        same_input_as: field of the first linear that reads the same input; empty if this is the
            first.
        writes_residual: whether the output is added to the residual stream. Basis Sharing does not
            share the bases of such linears.
        divided: what the ranks of a worker divide: the heads or features that are the linear's
            outputs, or its inputs if it writes the residual stream. None if they cannot.
        rms_norm: field of the weight ``[inner]`` of the RMSNorm whose output is the input of this
            linear and of all with the same input; empty if there is none, or another norm.
    """

    name: str
    out: int
    inner: int
    same_input_as: str = ""
    writes_residual: bool = False
    divided: Divided | None = None
    rms_norm: str = ""


@dataclass(frozen=True)
class VectorTensor:
    """One vector of a decoder layer, such as a norm's weight ``[size]``.

    Attributes:
        name: tensor name within a decoder layer.
        optional: whether a layer may lack it. A layer has all of its optional vectors or none.
    """

    name: str
    size: int
    optional: bool = False


@dataclass(frozen=True)
class LayerLayout:
    """The tensors of one decoder layer, each under its field in the family's ``layer_type``."""

    linears: Mapping[str, LinearTensor]
    vectors: Mapping[str, VectorTensor]

    def input_of(self, linear: str) -> str:
        """Return the field of the first linear that reads the same input as ``linear``."""
        return self.linears[linear].same_input_as or linear

    def groups(self) -> list[list[str]]:
        """Return the fields of the linears, grouped by their input, in order."""
        found: dict[str, list[str]] = {}
        for name in self.linears:
            found.setdefault(self.input_of(name), []).append(name)
        return list(found.values())

    def present(self, names: Collection[str], prefix: str) -> frozenset[str]:
        """Return the optional tensors of the layer under ``prefix`` that occur in ``names``.

        If one optional vector occurs, all of them are returned.
        """
        biases = (f"{linear.name}.bias" for linear in self.linears.values())
        found = {bias for bias in biases if prefix + bias in names}
        optional = {vector.name for vector in self.vectors.values() if vector.optional}
        if any(prefix + name in names for name in optional):
            found |= optional
        return frozenset(found)


@dataclass(frozen=True)
class TensorNames:
    """Names of the tensors outside the layers, and the name prefix of layer ``{index}``.

    Attributes:
        positions: learned position embeddings ``[context_length, hidden]``, which are added to the
            token embeddings; an empty name if the model has none.
        final_norm, lm_head: empty names if the model has none, as encoders.
        final_norm_bias: bias of the norm before the LM head ``[hidden]``; an empty name if the norm
            has none.
        ignored: patterns (`fnmatch`) of stored tensors that the model does not use.
        former: former endings of names, each with the present one.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: str = "model.layers.{index}."
    positions: str = ""
    final_norm_bias: str = ""
    ignored: tuple[str, ...] = ("*rotary_emb.inv_freq",)
    former: Mapping[str, str] = field(default_factory=dict)

    def layer_prefix(self, index: int) -> str:
        """Return the prefix of the tensor names of layer ``index``."""
        return self.layer.format(index=index)


StoredParts = Mapping[str, Sequence[tuple[str, int]]]
"""Stored tensors that hold several tensors: by name, the name and number of rows of each part.

Parts are in the order of their rows. Their names are those of `LayerLayout` and `TensorNames`. Rows
of a part with an empty name are skipped.
"""


@dataclass(frozen=True)
class GGUFFormat:
    """A family's GGUF files.

    Attributes:
        general_architecture: value of ``general.architecture``, and prefix of the metadata keys.
        architecture: Hugging Face architecture of the models in these files.
        layer_names: tensor name within ``blk.N.`` by field. Names of linears omit ``.weight``.
        interleaved: linears whose rows are stored for interleaved RoPE. Maps the field of the
            linear to the `ModelConfig` field with its number of heads.
    """

    general_architecture: str
    architecture: str
    layer_names: Mapping[str, str]
    interleaved: Mapping[str, str] = field(default_factory=dict)


class CheckpointFamily(ABC):
    """The checkpoints of a model family.

    Attributes:
        name: name in error messages.
        architectures: values of ``architectures`` in config.json that the family supports.
        layer_type: dataclass for a layer's weights. Its fields are `Linear` or `Tensor` and named
            as in `layout`; those of optional vectors default to None.
        tensor_names: tensor names outside the layers.
        gguf: the family's GGUF files; None if it has none.
    """

    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    layer_type: ClassVar[type[Any]]
    tensor_names: ClassVar[TensorNames] = TensorNames()
    gguf: ClassVar[GGUFFormat | None] = None

    @abstractmethod
    def parse_config(
        self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        """Return the shape that a ``config.json`` describes.

        Args:
            hf_config: content of ``config.json``.
            generation: content of ``generation_config.json``, empty if there is none.

        Raises:
            CheckpointError: a value is missing, malformed or not supported.
        """

    @abstractmethod
    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """Return the ``config.json`` from which `parse_config` reads ``config``."""

    @abstractmethod
    def layout(self, config: ModelConfig) -> LayerLayout:
        """Return the tensors of one layer, in the order in which they are computed."""

    def optional_tensors(self, hf_config: Mapping[str, Any]) -> frozenset[str]:  # noqa: ARG002
        """Return the names of the biases and optional vectors that a ``config.json`` requires.

        They are names within a layer, such as ``self_attn.q_proj.bias``.
        """
        return frozenset()

    def more_tensors(self, config: ModelConfig) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        """Return names and shapes of further tensors outside the layers (`Checkpoint.more`)."""
        return {}

    def stored_parts(self, config: ModelConfig) -> StoredParts:  # noqa: ARG002
        """Return the tensors of a Hugging Face folder that hold several, such as q, k and v."""
        return {}


_families: dict[str, CheckpointFamily] = {}


def register(family: CheckpointFamily) -> None:
    """Register ``family`` for its architectures.

    Raises:
        ValueError: another family is registered for one of them.
    """
    _add_built_in()
    _add(family)


def _add(family: CheckpointFamily) -> None:
    for architecture in family.architectures:
        if _families.get(architecture, family) is not family:
            raise ValueError(f"{architecture} is registered by {_families[architecture].name}")
    _families.update(dict.fromkeys(family.architectures, family))


def _add_built_in() -> None:
    for name in _BUILT_IN:
        _add(resolve_name(name))


def family_of(architecture: object) -> CheckpointFamily:
    """Return the family that supports an architecture of config.json.

    Raises:
        CheckpointError: no registered family and no installed plug-in supports it.
    """
    for families in _discovered():
        if isinstance(architecture, str) and architecture in families:
            return families[architecture]
    known = ", ".join(sorted(_families))
    raise CheckpointError(f"architecture {architecture!r} is not supported; supported: {known}")


def family_of_gguf(general_architecture: object) -> CheckpointFamily:
    """Return the family that supports GGUF files with this ``general.architecture``.

    Raises:
        CheckpointError: no registered family and no installed plug-in supports it.
    """
    known: dict[str, CheckpointFamily] = {}
    for families in _discovered():
        known = {
            family.gguf.general_architecture: family for family in families.values() if family.gguf
        }
        if isinstance(general_architecture, str) and general_architecture in known:
            return known[general_architecture]
    names = ", ".join(sorted(map(repr, known)))
    raise CheckpointError(
        f"GGUF architecture {general_architecture!r} is not supported; supported: {names}"
    )


def architectures() -> frozenset[str]:
    """Return the architectures of all families, including those of plug-ins."""
    *_, families = _discovered()
    return frozenset(families)


def _discovered() -> Iterator[Mapping[str, CheckpointFamily]]:
    """Yield the registry of families twice: before and after plug-ins are loaded."""
    _add_built_in()
    yield _families
    _load_plugins()
    yield _families


@cache
def _load_plugins() -> None:
    for plugin in entry_points(group=ENTRY_POINTS):
        try:
            _add(plugin.load())
        except (ImportError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"model plug-in {plugin.value} cannot be used: {error}"
            ) from error
