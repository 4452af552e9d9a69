"""The forward half of a model family: one decoder layer, written once over its parts.

Serving builds the parts from packed projections and attends over paged KV
(`runtime.models.decoder`). Compression builds them from plain differentiable linears and attends
over whole sequences (`runtime.compress.forward`). Both run the family's two methods around their
own attention:

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
from runtime.layers.pointwise import RmsNorm, silu_mul

Append = Callable[[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...], Batch], Tensor]
Prefill = Callable[[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...], Batch], Tensor]


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension.

    Attributes:
        function: ``(x, weight, eps)``, differentiable.
        kernel: ``(weight, eps)`` to a callable for serving; None uses ``function``.
    """

    function: Callable[[Tensor, Tensor, float], Tensor]
    kernel: Callable[[Tensor, float], Callable[[Tensor], Tensor]] | None = None

    def for_serving(self, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
        """Return the fastest callable for a weight ``[d]``."""
        if self.kernel is not None:
            return self.kernel(weight, eps)
        return lambda x: self.function(x, weight, eps)


@dataclass(frozen=True)
class Gate:
    """The product of an activation and a second input, as in SwiGLU.

    Attributes:
        function: ``(gate, up)``, each ``[..., d]``, differentiable.
        kernel: the same on ``[n, 2 d]``, gate first, for serving; None uses ``function``.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    kernel: Callable[[Tensor], Tensor] | None = None

    def for_serving(self) -> Callable[[Tensor], Tensor]:
        """Return the fastest callable from ``[n, 2 d]``, gate first, to ``[n, d]``."""
        if self.kernel is not None:
            return self.kernel
        return lambda gate_up: self.function(*gate_up.chunk(2, dim=1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, the mean square in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


RMS_NORM = Norm(rms_norm, RmsNorm)
SWIGLU = Gate(lambda gate, up: functional.silu(gate) * up, silu_mul)


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The callables of one layer. A family adds its own in a subclass.

    Attributes:
        qkv: input ``[..., in]`` to q, k and v in the form that the attention takes.
        head_norms: norms of each query head and each key head before RoPE, or None.
        append: serving only: replaces `KVFormat.append` by one launch that also applies the head
            norms; ``head_norms`` is then None.
        prefill: serving only: attention from the input of ``qkv`` on, for batches with several
            tokens per sequence; None runs ``qkv`` and the attention backend.
    """

    qkv: Callable[[Tensor], Any]
    head_norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    append: Append | None = None
    prefill: Prefill | None = None


class LayerBuilder(Protocol):
    """Makes callables from the fields of a layer's weights. Tensors are ``[..., size]``."""

    def has(self, field: str) -> bool:
        """Return whether the layer has an optional vector."""
        ...

    def qkv(self, *fields: str) -> Callable[[Tensor], Any]:
        """Return the projection to q, k and v: three linears, or one with them in that order."""
        ...

    def linear(self, field: str) -> Callable[[Tensor], Tensor]:
        """Return a linear as ``y = f(x)``."""
        ...

    def residual(self, field: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a linear as ``hidden = f(x, hidden)``, which adds its output to ``hidden``.

        When serving on a GPU it may overwrite ``hidden``.
        """
        ...

    def gated(self, gate_field: str, up_field: str, gate: Gate) -> Callable[[Tensor], Tensor]:
        """Return ``gate`` of two linears that read the same input."""
        ...

    def norm(self, field: str) -> Callable[[Tensor], Tensor]:
        """Return the family's norm with this weight."""
        ...


Parts = TypeVar("Parts", bound=LayerParts)


class ModelFamily(CheckpointFamily, Generic[Parts]):
    """Models that share a decoder layer: its checkpoints and its forward pass.

    Around the layers every family has a token embedding, a final norm and an LM head. Attention is
    causal, over ``num_heads`` query heads that share ``num_kv_heads`` KV heads, with RoPE.

    Attributes:
        norm: the norm of the layers and before the LM head; eps is ``config.rms_norm_eps``.
        packed_gemm: whether `runtime.gemm` packs its layers for a GPU.
    """

    norm: ClassVar[Norm] = RMS_NORM
    packed_gemm: ClassVar[bool] = False

    @abstractmethod
    def parts(self, build: LayerBuilder) -> Parts:
        """Return the callables of one layer, made by ``build``."""

    @abstractmethod
    def before_attention(self, parts: Parts, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the input of ``parts.qkv``, and the tensors that `after_attention` reads.

        Args:
            hidden: residual stream, ``[..., hidden]``.

        In the last layer the carried tensors are cut to the rows that need logits.
        """

    @abstractmethod
    def after_attention(self, parts: Parts, attended: Tensor, *carried: Tensor) -> Tensor:
        """Return the residual stream after the layer.

        Must not change its arguments in place: gradients flow through it under compression.

        Args:
            attended: output of attention, heads concatenated, ``[..., num_heads * head_dim]``.
        """
