"""KV format `lowrank`: storage and attention of latents, and what it takes from a model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.config import ModelConfig
from runtime.errors import KVFormatError
from runtime.kernels.alignment import round_up
from runtime.kv.dense import DenseFormat, DenseLayer
from runtime.kv.format import KVFormat, Plane
from runtime.kv.lowrank import reference
from runtime.kv.lowrank.factors import (
    LayerFactors,
    chained_hash,
    latent_ranks,
    without_factors,
)
from runtime.kv.names import LOWRANK
from runtime.kv.rotation import PageRotation

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.lowrank.gpu import LatentKernels


class RebuiltPages:
    """K and V of one layer, bf16 `[page, kv_heads, slot, dim]` each, rebuilt from latents.

    The layers of a model use the same memory one after another. Pages have the ids of the cache's
    pages, so that attention reads them with the page tables of a batch.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        # CUDA graphs hold the addresses of all of them. The last one has the most pages.
        self._made: list[tuple[Tensor, Tensor]] = []

    def like(self, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V with at least the pages of a plane of a cache, which all have one size."""
        pages, _, slots, _ = plane.shape
        if not self._made or len(self._made[-1][0]) < pages:
            shape = pages, self._config.num_kv_heads, slots, self._config.head_dim
            k, v = torch.zeros(2, *shape, dtype=torch.bfloat16, device=self._device)
            self._made.append((k, v))
        return self._made[-1]


@dataclass(frozen=True)
class LowRankLayer:
    """One layer; a `LayerKV` whose planes are the latents of K and V.

    Attributes:
        dense: attention over rebuilt K and V.
        rebuilt: memory for them.
        kernels: Triton kernels, or None to use plain torch.
    """

    factors: LayerFactors
    rebuild: reference.Rebuild
    dense: DenseLayer
    rebuilt: RebuiltPages
    kernels: "LatentKernels | None" = None

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        if self.kernels is not None:
            return self.kernels.append(qkv, rope, planes, batch, self.factors)
        return reference.append(qkv, rope, planes, batch, self.factors, self.rebuild.dim)

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        if self.kernels is not None and batch.single:
            return self.kernels.decode(q, planes, batch, self.factors)
        k_pages, v_pages = self.rebuilt.like(planes[0])
        if self.kernels is not None:
            self.kernels.rebuild(planes, batch, self.factors, k_pages, v_pages)
        else:
            pages, first_positions = reference.pages_of(batch, planes[0].shape[2])
            keys, values = self.rebuild(planes, pages, first_positions)
            k_pages[pages], v_pages[pages] = keys.bfloat16(), values.bfloat16()
        return self.dense.attend(q, (k_pages, v_pages), batch)


class LowRankFormat(KVFormat):
    """Latents of K before RoPE and of V. Planes are bf16 for any dtype of the model.

    `fold_weights` takes U and the biases of K and V, so that the projections of a layer compute q
    and the latents. The artifact hash is that of all of them once the model is loaded.

    Args:
        dense: format `dense` for the model, whose attention reads rebuilt K and V.
        layers: layers of the model, of which only shapes are read.
        by_halves: whether the elements of q heads are in the order of
            `runtime.gemm.weights.by_halves`.

    Raises:
        KVFormatError: the format does not support the model; see `factors.latent_ranks`.
    """

    name = LOWRANK
    version = 1
    keeps_rope = False
    keeps_latents = True

    def __init__(
        self,
        config: ModelConfig,
        dense: DenseFormat,
        layers: Sequence[Any],
        device: torch.device,
        dtype: torch.dtype,
        *,
        by_halves: bool = False,
    ) -> None:
        if any(config.windows):
            raise KVFormatError(f"KV format {LOWRANK} does not support sliding windows")
        self._ranks = latent_ranks(config, layers)
        self._config = config
        self._dense = dense
        self._device = device
        self._dtype = dtype
        self._rotation = PageRotation(config, device)
        self._rebuilt = RebuiltPages(config, device)
        self._kernels = None
        if dense.graph_safe and _runs_triton(device):
            from runtime.kv.lowrank.gpu import LatentKernels

            self._kernels = LatentKernels(config, self._rotation, by_halves=by_halves)
        self._layers: dict[int, LowRankLayer] = {}
        self.graph_safe = dense.graph_safe and self._kernels is not None

    @property
    def _heads_width(self) -> int:
        """Elements of K of all heads of a token."""
        return self._config.num_kv_heads * self._config.head_dim

    @property
    def kernels(self) -> str:
        return f"{self._dense.kernels}+{self.name}-{self.version}"

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        return tuple(
            Plane(name, torch.bfloat16, (1, page_size, round_up(rank)))
            for name, rank in zip("kv", self._ranks[layer], strict=True)
        )

    def scratch_bytes(self, page_size: int) -> int:
        return 2 * torch.bfloat16.itemsize * page_size * self._heads_width

    def layer(self, index: int) -> LowRankLayer:
        return self._layers[index]

    def fold_weights(self, index: int, weights: Any) -> Any:
        if index not in self._layers:
            factors = LayerFactors.of(weights, self._device, self._dtype)
            self.artifact_hash = chained_hash(self.artifact_hash, factors.digest)
            self.weight_bytes += sum(tensor.nbytes for tensor in factors.tensors)
            self._layers[index] = LowRankLayer(
                factors,
                reference.Rebuild.of(factors, self._rotation, self._config.head_dim),
                self._dense.layer(index),
                self._rebuilt,
                self._kernels,
            )
        return without_factors(weights)


def _runs_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run: on GPUs, and on CPUs in Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
