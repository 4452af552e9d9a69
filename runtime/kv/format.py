"""Interface of a KV format: how keys and values are stored, sent and attended to."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.config import ModelConfig
from runtime.pages.groups import PageGroup, Part

KV_PLANES = 2
"""Number of planes of K and V, which come first in the layers of built-in formats."""
KV = PageGroup("kv")
"""Page group of formats whose planes hold all pages of a sequence."""


def sliding_window(tokens: int) -> PageGroup:
    """Return the page group of layers that attend to the last ``tokens`` tokens alone."""
    return PageGroup(f"window_{tokens}", Part.ENDS, 0, tokens)


@dataclass(frozen=True)
class Plane:
    """Elements of one layer over all pages: a tensor ``[page, *shape]`` of ``dtype``.

    The elements of a KV head depend on K and V of that head alone, unless the format refuses ranks
    that have only some of the heads that it stores together. Each page is contiguous. Consecutive
    pages may have other planes of their group between them.

    Attributes:
        name: name, unique within the layer. The codec has one codebook per layer and name.
        shape: ``(kv_heads, page_size, dim)`` of one page. All planes of a cache have the same
            ``kv_heads`` and ``page_size``; ``dim`` may differ.
        encodable: whether the elements are floating-point values that a lossless codec may encode.
            Planes of integers, packed codes or scales set it to False and are sent as raw bytes.
        group: page group of the plane. The pages of each group are numbered separately. In the
            batch that a layer gets, `Batch.page_table` is the table of the group of its first
            plane.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    encodable: bool = True
    group: PageGroup = KV


class LayerKV(Protocol):
    """Storage and attention of one layer in some KV format."""

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        """Write K and V of a batch's tokens, one or many per sequence, into the layer's planes.

        Args:
            qkv: `[n, (heads + 2 kv_heads) * dim]`, before RoPE. If `KVFormat.keeps_latents`, q
                before RoPE and the latents of K and V, `[n, heads * dim + k_rank + v_rank]`.
            rope: cosines and sines, fp32 `[context, dim / 2]` each.
            planes: the layer's planes, in the order of `KVFormat.planes`.

        Returns:
            q in the form that `attend` takes, `[n, heads, dim]`.
        """
        ...

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """Return the causal attention of a batch's tokens, `[n, heads * dim]`.

        Rows beyond the batch's last sequence are undefined in the result.
        """
        ...


class KVFormat(ABC):
    """A representation of keys and values in pages.

    A prefill worker and a decode worker are compatible only if ``name``, ``version`` and
    ``artifact_hash`` are equal.

    Attributes:
        name: stable name of the format.
        version: number to increase whenever the same K and V are stored as different bits.
        artifact_hash: hash of calibration results; empty if the format has none.
        graph_safe: whether `append` and `attend` can be captured in a CUDA graph. This requires
            fixed shapes and grids, and that no device value is read on the host.
        dense_bf16: whether the planes of every layer are K (after RoPE) and V, bf16
            `[page, kv_head, slot, head_dim]`. Fused kernels may then read and write the planes
            without calling `append` and `attend`.
        keeps_rope: whether the tokens of a page may have any positions, as after an eviction
            (`runtime.kv.eviction`); None if the format does not say.
        keeps_latents: whether `LayerKV.append` gets the latents V x of K and V instead of K and V,
            because `fold_weights` takes their U.
        weight_bytes: bytes of the model's weights that the format holds.
    """

    name: str
    version: int
    artifact_hash: str = ""
    graph_safe: bool = False
    dense_bf16: bool = False
    keeps_rope: bool | None = None
    keeps_latents: bool = False
    weight_bytes: int = 0

    @property
    @abstractmethod
    def kernels(self) -> str:
        """Name and version of the format's kernels; part of the kernel plan's hash."""

    @abstractmethod
    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        """Return the planes of one layer. Methods of `LayerKV` get their tensors in this order."""

    @abstractmethod
    def layer(self, index: int) -> LayerKV:
        """Return the storage and attention of one layer; called once per layer and step."""

    def scratch_bytes(self, page_size: int) -> int:  # noqa: ARG002 - by default, none
        """Return the bytes that attention needs besides the cache, per page of the first group."""
        return 0

    def fold_weights(self, index: int, weights: Any) -> Any:  # noqa: ARG002 - by default, none
        """Take from a layer's weights what the format computes itself.

        It is called for each layer when the model is loaded, and again when a streamed model reads
        the layer.

        Args:
            weights: the layer, an instance of the family's ``layer_type``.

        Returns:
            The layer from which projections are built.
        """
        return weights


class KVFormatFactory(Protocol):
    """Creates a format for one model on one device."""

    def __call__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        by_halves: bool = False,
    ) -> KVFormat:
        """Create the format.

        Args:
            dtype: dtype in which the model computes, and therefore that of q, k and v.
            by_halves: whether the elements of each head in ``qkv`` are in the order of
                `runtime.gemm.weights.by_halves`, as in models with packed weights.

        Raises:
            ValueError: the format does not support this model.
        """
        ...
