"""Stored pages of `fdc`: encoding and decoding in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import CalibrationError
from runtime.kv.calibration import Artifact, CalibratedFormat
from runtime.kv.calibration.projection import project_pages
from runtime.kv.fdc.calibrate import NAME, VERSION
from runtime.kv.format import Plane
from runtime.kv.rotation import PageRotation


@dataclass(frozen=True)
class FdcLayer:
    """Implements `runtime.kv.compressed.CompressedLayer`.

    Attributes:
        k_basis: R of the keys and queries, fp32 ``[kv_heads, dim, k_width]``.
        v_basis: B of the values, fp32 ``[kv_heads, dim, v_width]``.
        k_ranks, v_ranks: rank of each head. Columns of the bases beyond it are 0.
        rotation: RoPE of the model if K is projected before RoPE, else None.
    """

    k_basis: Tensor
    v_basis: Tensor
    k_ranks: tuple[int, ...]
    v_ranks: tuple[int, ...]
    rotation: PageRotation | None = None

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
        k_plane[targets] = project_pages(k, self.k_basis).to(k_plane.dtype)
        v_plane[targets] = project_pages(values.float(), self.v_basis).to(v_plane.dtype)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k_plane, v_plane = planes
        keys = project_pages(k_plane[pages].float(), self.k_basis.mT)
        if self.rotation is not None:
            keys = self.rotation.apply(keys, first_positions)
        values = project_pages(v_plane[pages].float(), self.v_basis.mT)
        return keys, values


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

    @property
    def keeps_rope(self) -> bool:
        """Whether K is projected after RoPE; see `CompressedFormat`."""
        return all(layer.rotation is None for layer in self._layers)

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

    def _read_layers(self, artifact: Artifact, device: torch.device | str) -> list[FdcLayer]:
        config = self._config
        heads = config.num_kv_heads
        tables = {
            plane: artifact.tensor(f"{plane}_ranks", (config.num_layers, heads), torch.int64)
            for plane in "kv"
        }
        after_rope = artifact.options.get("prc", True)
        rotation = None if after_rope else PageRotation(config, device)
        layers = []
        for index in range(config.num_layers):
            shape = heads, config.head_dim, None
            k_basis, v_basis = (artifact.tensor(f"{x}_basis.{index}", shape) for x in "kv")
            k_ranks, v_ranks = (tuple(tables[x][index].tolist()) for x in "kv")
            _check_ranks(index, k_basis, k_ranks)
            _check_ranks(index, v_basis, v_ranks)
            bases = k_basis.to(device), v_basis.to(device)
            layers.append(FdcLayer(*bases, k_ranks, v_ranks, rotation))
        return layers


def _check_ranks(layer: int, basis: Tensor, ranks: tuple[int, ...]) -> None:
    _, dim, width = basis.shape
    if not 1 <= width <= dim or min(ranks) < 1 or max(ranks) != width:
        raise CalibrationError(
            f"calibration of {NAME}, layer {layer}: ranks {ranks} do not fit a basis of {width} "
            f"columns of {dim}"
        )
