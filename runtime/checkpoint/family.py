"""The checkpoint half of a model family: its configs and tensor names, and the registry.

A family covers architectures that share a decoder layer, such as Llama, Mistral and Qwen. Readers,
writers and converters work on any registered family through `CheckpointFamily`; the forward pass is
`runtime.models.family.ModelFamily`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, ClassVar

from runtime.config import ModelConfig
from runtime.errors import CheckpointError

ENTRY_POINTS = "headrace.models"
"""Entry-point group of families in other packages; each value is a family object."""
_BUILT_IN = ("runtime.models.llama:LLAMA",)
"""Families of this package; by name, since models import checkpoints."""


@dataclass(frozen=True)
class LinearTensor:
    """One linear layer of a decoder layer, as a checkpoint stores it.

    Attributes:
        name: module name inside a decoder layer; tensors are ``{name}.weight`` ``[out, inner]`` and
            optionally ``{name}.bias`` ``[out]``.
        out, inner: output and input size.
        same_input_as: field of the first linear that reads the same input; empty for that one.
        writes_residual: whether the output is added to the residual stream. Basis Sharing does not
            share these across layers.
    """

    name: str
    out: int
    inner: int
    same_input_as: str = ""
    writes_residual: bool = False


@dataclass(frozen=True)
class VectorTensor:
    """One vector of a decoder layer, such as a norm's weight ``[size]``.

    Attributes:
        name: tensor name inside a decoder layer.
        optional: whether a layer may lack it.

    A file has all optional vectors of a layer or none of them.
    """

    name: str
    size: int
    optional: bool = False


@dataclass(frozen=True)
class LayerLayout:
    """The tensors of one decoder layer, by field of the family's `layer_type`."""

    linears: Mapping[str, LinearTensor]
    vectors: Mapping[str, VectorTensor]

    def input_of(self, linear: str) -> str:
        """Return the field of the first linear that reads the same input as ``linear``."""
        return self.linears[linear].same_input_as or linear

    def present(self, names: Collection[str], prefix: str) -> frozenset[str]:
        """Return the optional tensors of the layer under ``prefix`` that ``names`` calls for."""
        biases = (f"{linear.name}.bias" for linear in self.linears.values())
        found = {bias for bias in biases if prefix + bias in names}
        optional = {vector.name for vector in self.vectors.values() if vector.optional}
        if any(prefix + name in names for name in optional):
            found |= optional
        return frozenset(found)


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors outside the layers, and the prefix of layer ``{index}``."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: str = "model.layers.{index}."

    def layer_prefix(self, index: int) -> str:
        """Return what precedes a tensor's name inside layer ``index``."""
        return self.layer.format(index=index)


@dataclass(frozen=True)
class GGUFFormat:
    """A family's GGUF files.

    Attributes:
        general_architecture: value of ``general.architecture``, and prefix of the metadata keys.
        architecture: Hugging Face architecture of the model that these files hold.
        layer_names: name inside ``blk.N.`` by field; those of linears without ``.weight``.
        interleaved: linears whose rows are stored for interleaved RoPE, by the `ModelConfig` field
            that has their number of heads.
    """

    general_architecture: str
    architecture: str
    layer_names: Mapping[str, str]
    interleaved: Mapping[str, str] = field(default_factory=dict)


class CheckpointFamily(ABC):
    """The checkpoints of a model family.

    Attributes:
        name: name in messages.
        architectures: values of ``architectures`` in config.json that the family reads.
        layer_type: dataclass of a layer's weights. Its fields are `Linear` or `Tensor`, named as in
            `layout`; those of optional vectors default to None.
        tensor_names: names outside the layers.
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
            generation: ``generation_config.json``, empty if there is none.

        Raises:
            CheckpointError: a value is missing, malformed or not supported.
        """

    @abstractmethod
    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """Return the ``config.json`` that `parse_config` reads back as ``config``."""

    @abstractmethod
    def layout(self, config: ModelConfig) -> LayerLayout:
        """Return the tensors of one layer, in the order in which they are computed."""

    def optional_tensors(self, hf_config: Mapping[str, Any]) -> frozenset[str]:  # noqa: ARG002
        """Return the names of biases and optional vectors that a ``config.json`` calls for.

        Names are those inside a layer, such as ``self_attn.q_proj.bias``.
        """
        return frozenset()


_families: dict[str, CheckpointFamily] = {}


def register(family: CheckpointFamily) -> None:
    """Make ``family`` the one that reads its architectures.

    Raises:
        ValueError: another family reads one of them already.
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
    """Return the family that reads an architecture of config.json.

    Raises:
        CheckpointError: no registered family and no installed plug-in reads it.
    """
    for families in _discovered():
        if isinstance(architecture, str) and architecture in families:
            return families[architecture]
    known = ", ".join(sorted(_families))
    raise CheckpointError(f"architecture {architecture!r} is not supported, only {known}")


def family_of_gguf(general_architecture: object) -> CheckpointFamily:
    """Return the family that reads GGUF files with this ``general.architecture``.

    Raises:
        CheckpointError: no registered family and no installed plug-in reads it.
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
        f"GGUF architecture {general_architecture!r} is not supported, only {names}"
    )


def architectures() -> frozenset[str]:
    """Return the architectures that all families read, those of plug-ins included."""
    *_, families = _discovered()
    return frozenset(families)


def _discovered() -> Iterator[Mapping[str, CheckpointFamily]]:
    """Yield the registry with the built-in families, then with those of plug-ins as well."""
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
