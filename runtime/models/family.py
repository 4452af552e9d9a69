"""Forward pass of a model family: the decoder layer, defined once over exchangeable parts.

`runtime.checkpoint.family` defines the config and tensor names of a family.

Serving builds the parts from packed projections and attends over paged KV
(`runtime.models.decoder`). Compression builds them from plain differentiable linears and attends
over whole sequences (`runtime.offline.compress.forward`). Both call the two methods of the family
before and after attention:

    x, carried = family.before_attention(parts, hidden)
    attended = attention(parts.qkv(x))
    hidden = family.after_attention(parts, attended, *carried)
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from runtime.attention.base import Batch
from runtime.checkpoint.family import CheckpointFamily
from runtime.checkpoint.weights import Checkpoint
from runtime.config import ModelConfig
from runtime.layers.pointwise import RmsNorm, silu_mul

Append = Callable[[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...], Batch], Tensor]
"""Function that writes K and V into pages and returns q, with arguments as in `LayerKV.append`."""
Prefill = Callable[[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...], Batch], Tensor]
"""Function ``(x, rope, planes, batch)`` that projects to q, k and v, writes pages and attends."""


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension.

    Attributes:
        function: the norm as ``(x, weight, eps)``, or as ``(x, weight, eps, bias)`` if it has a
            bias; differentiable.
        kernel: function ``(weight, eps)`` that returns a fast callable for serving; None if serving
            uses ``function``. Norms with a bias have none.
    """

    function: Callable[..., Tensor]
    kernel: Callable[[Tensor, float], Callable[[Tensor], Tensor]] | None = None

    def plain(
        self, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return ``function`` with a weight ``[d]`` and, if there is one, a bias ``[d]``."""
        vectors = (weight, eps) if bias is None else (weight, eps, bias)
        return lambda x: self.function(x, *vectors)

    def for_serving(
        self, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return the fastest callable; for the arguments, see `plain`."""
        if self.kernel is not None and bias is None:
            return self.kernel(weight, eps)
        return self.plain(weight, eps, bias)


@dataclass(frozen=True)
class Gate:
    """An activation of one input times a second input, as in SwiGLU.

    Attributes:
        function: ``(gate, up)``, each ``[..., d]``, differentiable.
        kernel: the same function over one tensor ``[n, 2 d]``, gate first, for serving; None if
            serving uses ``function``.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    kernel: Callable[[Tensor], Tensor] | None = None

    def for_serving(self) -> Callable[[Tensor], Tensor]:
        """Return the fastest callable from ``[n, 2 d]``, gate first, to ``[n, d]``."""
        if self.kernel is not None:
            return self.kernel
        return lambda gate_up: self.function(*gate_up.chunk(2, dim=1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight`` over the last dimension, with the mean square in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Return LayerNorm over the last dimension."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


RMS_NORM = Norm(rms_norm, RmsNorm)
LAYER_NORM = Norm(layer_norm)
SWIGLU = Gate(lambda gate, up: functional.silu(gate) * up, silu_mul)


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The callables of one layer. A family adds its own in a subclass.

    Attributes:
        qkv: projection of ``[..., in]`` to q, k and v, as one tensor or three, see
            `LayerBuilder.qkv`.
        head_norms: norms applied to each query head and each key head before RoPE, or None.
        append: for serving, a replacement of `KVFormat.append` that also applies the head norms;
            ``head_norms`` is then None.
        prefill: for serving, a fused replacement of ``qkv`` and attention for batches with several
            tokens per sequence; None if there is none.
    """

    qkv: Callable[[Tensor], Any]
    head_norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    append: Append | None = None
    prefill: Prefill | None = None


class LayerBuilder(Protocol):
    """Makes callables from the fields of a layer's weights. Tensors are ``[..., size]``.

    Attributes:
        config: shape of the model.
    """

    config: ModelConfig

    def has(self, field: str) -> bool:
        """Return whether the layer has the optional vector ``field``."""
        ...

    def qkv(self, *fields: str) -> Callable[[Tensor], Any]:
        """Return the projection of one input to q, k and v: three linears, or one fused linear."""
        ...

    def linear(self, field: str) -> Callable[[Tensor], Tensor]:
        """Return a linear as ``y = f(x)``."""
        ...

    def residual(self, field: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a linear as ``hidden = f(x, hidden)``, which adds its output to ``hidden``.

        When serving on a GPU, ``f`` may overwrite ``hidden``.
        """
        ...

    def gated(self, gate_field: str, up_field: str, gate: Gate) -> Callable[[Tensor], Tensor]:
        """Return ``gate`` applied to two linears of the same input."""
        ...

    def norm(self, field: str, bias: str = "") -> Callable[[Tensor], Tensor]:
        """Return the family's norm with this weight and, if a field is named, this bias."""
        ...


Parts = TypeVar("Parts", bound=LayerParts)


class ModelFamily(CheckpointFamily, Generic[Parts]):
    """A family of models with the same decoder layer: their checkpoints and forward pass.

    Every family has a token embedding before the layers. Decoders have a final norm and an LM head
    after them. Their attention is causal, over ``num_heads`` query heads that share
    ``num_kv_heads`` KV heads. Positions are encoded by RoPE (`ModelConfig.rope`), by learned
    embeddings (`TensorNames.positions`), or by both.

    Attributes:
        norm: norm of the layers and before the LM head; its eps is ``config.rms_norm_eps``.
        packed_gemm: whether `runtime.gemm` supports the layers.
        encoder: whether models are encoders, which `runtime.encoder` computes: with bidirectional
            attention, and without a final norm and an LM head.
    """

    norm: ClassVar[Norm] = RMS_NORM
    packed_gemm: ClassVar[bool] = False
    encoder: ClassVar[bool] = False

    @abstractmethod
    def parts(self, build: LayerBuilder) -> Parts:
        """Return the callables of one layer, built with ``build``."""

    def embedded(self, checkpoint: Checkpoint, hidden: Tensor) -> Tensor:  # noqa: ARG002
        """Return the input of the first layer.

        Args:
            hidden: sum of the token and position embeddings, ``[..., hidden]``.
        """
        return hidden

    @abstractmethod
    def before_attention(self, parts: Parts, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the layer up to the q, k and v projections.

        Args:
            hidden: residual stream, ``[..., hidden]``.

        Returns:
            Input of ``parts.qkv``, and the tensors to carry over to `after_attention`. In the last
            layer, these are cut to the rows that need logits.
        """

    @abstractmethod
    def after_attention(self, parts: Parts, attended: Tensor, *carried: Tensor) -> Tensor:
        """Return the residual stream after the layer.

        It must not modify its arguments in place, since compression computes gradients through it.

        Args:
            attended: output of attention, heads concatenated, ``[..., num_heads * head_dim]``.
            carried: tensors from `before_attention`.
        """
