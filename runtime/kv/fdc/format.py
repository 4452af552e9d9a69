"""Compressed pages of `fdc`: encoding and decoding in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.errors import CalibrationError
from runtime.kv.calibration import Artifact, CalibratedFormat
from runtime.kv.calibration.bases import RANK_MULTIPLE, split_basis
from runtime.kv.calibration.projection import project_pages
from runtime.kv.compressed import CompressedLayer
from runtime.kv.fdc.calibrate import NAME, VERSION
from runtime.kv.fdc.prefill import LatentPrefill, attend_projected
from runtime.kv.fdc.rows import pack_rows, unpack_rows
from runtime.kv.format import Plane
from runtime.kv.rotation import PageRotation

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import CompressedPageKernels, LayerInputs
    from runtime.kv.kernel_source import KernelSource


@dataclass(frozen=True)
class FdcLayer(CompressedLayer):
    """Latents of K and V.

    Attributes:
        k_basis: R of the keys and queries, fp32 ``[kv_heads, dim, k_width]``.
        v_basis: B of the values, fp32 ``[kv_heads, dim, v_width]``.
        k_ranks, v_ranks: rank of each head. Columns of the bases beyond it are 0.
        rotation: RoPE of the model if K is projected before RoPE, else None.
        format_kernels: returns the Triton kernels, or None if they do not run on a device.
        prefill: prefill attention with projected queries and keys; None for the usual prefill.
    """

    k_basis: Tensor
    v_basis: Tensor
    k_ranks: tuple[int, ...]
    v_ranks: tuple[int, ...]
    rotation: PageRotation | None = None
    format_kernels: "Callable[[torch.device], CompressedPageKernels | None]" = lambda _: None
    prefill: LatentPrefill | None = None

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        k_plane, v_plane = planes
        k = keys.float()
        if self.rotation is not None:
            k = self.rotation.undo(k, first_positions)
        v = values.float()
        for plane, x, basis, ranks in (
            (k_plane, k, self.k_basis, self.k_ranks),
            (v_plane, v, self.v_basis, self.v_ranks),
        ):
            plane[targets] = pack_rows(project_pages(x, basis).to(plane.dtype), ranks)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k_plane, v_plane = planes
        k, v = unpack_rows(k_plane[pages], self.k_ranks), unpack_rows(v_plane[pages], self.v_ranks)
        keys = project_pages(k.float(), self.k_basis.mT)
        if self.rotation is not None:
            keys = self.rotation.apply(keys, first_positions)
        return keys, project_pages(v.float(), self.v_basis.mT)

    def attend_prompt(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor | None:
        """Attend with the projected queries and keys of prompts; None without ``prefill``.

        Args:
            q: `[n, heads, dim]`, after RoPE.
            planes: full-precision K and V of the layer.
        """
        if self.prefill is None:
            return None
        k_pages, v_pages = planes
        if not self.format_kernels(q.device):
            return attend_projected(q, k_pages, v_pages, self.k_basis, batch)
        basis, _, ranks = self._inputs.planes
        assert isinstance(basis, Tensor)
        assert isinstance(ranks, Tensor)
        return self.prefill.attend(q, k_pages, v_pages, basis, ranks, batch)

    def kernels(self, device: torch.device) -> "CompressedPageKernels | None":
        """Return the fused kernels, or None if they do not run on a device or for this model."""
        return self._kernels if self.format_kernels(device) else None

    @cached_property
    def _kernels(self) -> "CompressedPageKernels":
        shared = self.format_kernels(self.k_basis.device)
        assert shared is not None, "kernels are used on the device of the bases"
        return shared.of_layer(self._inputs)

    @cached_property
    def _inputs(self) -> "LayerInputs":
        return self.kernel_inputs()

    def kernel_inputs(self) -> "LayerInputs":
        """Return bases, ranks and costs of tiles; see `runtime.kv.fdc.kernels`."""
        from runtime.kv.gpu import LayerInputs

        ranks = torch.tensor([self.k_ranks, self.v_ranks], dtype=torch.int32) // RANK_MULTIPLE
        bases = split_basis(self.k_basis), split_basis(self.v_basis)
        costs = [2 * (k + v) for k, v in zip(self.k_ranks, self.v_ranks, strict=True)]
        return LayerInputs((*bases, ranks.to(self.k_basis.device)), tuple(costs))


class FdcFormat(CalibratedFormat[FdcLayer]):
    """Format `fdc`; artifacts are results of `runtime.kv.fdc.calibrate`."""

    name = NAME
    version = VERSION

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        bases = self._layers[layer].k_basis, self._layers[layer].v_basis
        return tuple(
            Plane(name, torch.bfloat16, (basis.shape[0], page_size, basis.shape[2]))
            for name, basis in zip(("k", "v"), bases, strict=True)
        )

    def unpadded_bytes_per_token(self, layer: int) -> int:
        """Return the bytes of one layer and token that are not padding of heads with lower rank.

        The planes take more: ``kv_heads`` times the largest rank, for K and for V.
        """
        found = self._layers[layer]
        return 2 * (sum(found.k_ranks) + sum(found.v_ranks))

    def describe(self, layer: int) -> str:
        found = self._layers[layer]
        sides = ("K", found.k_ranks), ("V", found.v_ranks)
        return ", ".join(f"{side} {' '.join(map(str, ranks))}" for side, ranks in sides)

    def kernel_source(self) -> "KernelSource":
        """See `CalibratedFormat`."""
        from runtime.kv.fdc import kernels
        from runtime.kv.kernel_source import EncodeSource, KernelSource

        return KernelSource(
            EncodeSource(kernels.encode, tokens=32, warps=2, stages=2),
            kernels.attend,
            kernels.finish,
            tile=64,
            stages=5,
            programs=5,
            latents=True,
        )

    def _read_layers(self, artifact: Artifact, device: torch.device | str) -> list[FdcLayer]:
        config = self._config
        heads, own = config.all_kv_heads, slice(config.kv_heads.start, config.kv_heads.stop)
        tables = {
            plane: artifact.tensor(f"{plane}_ranks", (config.num_layers, heads), torch.int64)
            for plane in "kv"
        }
        after_rope = artifact.options.get("prc", True)
        self.keeps_rope = after_rope
        rotation = None if after_rope else PageRotation(config, device)
        compressed = artifact.options.get("compressed_prefill", False)
        prefill = LatentPrefill(config) if compressed else None
        layers = []
        for index in range(config.num_layers):
            shape = heads, config.head_dim, None
            k_basis, v_basis = (artifact.tensor(f"{x}_basis.{index}", shape) for x in "kv")
            k_ranks, v_ranks = (tuple(tables[x][index].tolist()) for x in "kv")
            _check_ranks(index, k_basis, k_ranks)
            _check_ranks(index, v_basis, v_ranks)
            # The width of the planes is that of all heads, so that all ranks have equal planes.
            bases = k_basis[own].to(device), v_basis[own].to(device)
            ranks = k_ranks[own], v_ranks[own]
            layers.append(FdcLayer(*bases, *ranks, rotation, self.kernels, prefill))
        # All ranks of a worker choose alike, so that all can replay steps or none.
        whole = (table % RANK_MULTIPLE == 0 for table in tables.values())
        self.fused = after_rope and all(bool(multiples.all()) for multiples in whole)
        return layers


def _check_ranks(layer: int, basis: Tensor, ranks: tuple[int, ...]) -> None:
    _, dim, width = basis.shape
    if not 1 <= width <= dim or min(ranks) < 1 or max(ranks) != width:
        raise CalibrationError(
            f"calibration of {NAME}, layer {layer}: ranks {ranks} do not fit a basis of {width} "
            f"columns of {dim}"
        )
