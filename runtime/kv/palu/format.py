"""Compressed pages of `palu`: encoding and decoding in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.errors import CalibrationError, KVFormatError
from runtime.kv.calibration import Artifact, CalibratedFormat
from runtime.kv.calibration.bases import split_basis
from runtime.kv.calibration.projection import project_pages
from runtime.kv.compressed import CompressedLayer
from runtime.kv.format import Plane
from runtime.kv.palu.calibrate import NAME, VERSION
from runtime.kv.rotation import PageRotation

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import CompressedPageKernels, LayerInputs
    from runtime.kv.kernel_source import KernelSource

_MAX_FUSED_GROUP = 4
"""Maximum number of KV heads of a group in the Triton kernels."""
_MAX_FUSED_DIM = 256
_ALIGNED = 8
"""Number of bf16 latents in 16 bytes."""


@dataclass(frozen=True)
class PaluLayer(CompressedLayer):
    """Latents of K before RoPE, and of V.

    Attributes:
        k_basis: fp32 ``[groups, g * dim, g * k_width]``, for K before RoPE of g heads.
        v_basis: fp32 ``[kv_heads, dim, v_width]``.
        rotation: RoPE of the model.
        format_kernels: returns the Triton kernels, or None if they do not run on a device.
    """

    k_basis: Tensor
    v_basis: Tensor
    rotation: PageRotation
    format_kernels: "Callable[[torch.device], CompressedPageKernels | None]" = lambda _: None

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        k_plane, v_plane = planes
        unrotated = self.rotation.undo(keys.float(), first_positions)
        latents = project_pages(self._group(unrotated), self.k_basis)
        k_plane[targets] = self._ungroup(latents, keys.shape[1]).to(k_plane.dtype)
        v_plane[targets] = project_pages(values.float(), self.v_basis).to(v_plane.dtype)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k_plane, v_plane = planes
        grouped = project_pages(self._group(k_plane[pages].float()), self.k_basis.mT)
        unrotated = self._ungroup(grouped, k_plane.shape[1])
        values = project_pages(v_plane[pages].float(), self.v_basis.mT)
        return self.rotation.apply(unrotated, first_positions), values

    def kernels(self, device: torch.device) -> "CompressedPageKernels | None":
        """Return the fused kernels, or None if they do not run on a device or for this model."""
        return self._kernels if self.format_kernels(device) else None

    @cached_property
    def _kernels(self) -> "CompressedPageKernels":
        shared = self.format_kernels(self.k_basis.device)
        assert shared is not None, "kernels are used on the device of the bases"
        return shared.of_layer(self.kernel_inputs())

    def kernel_inputs(self) -> "LayerInputs":
        """Return bases, RoPE and the size of groups; see `runtime.kv.palu.kernels`."""
        from runtime.kv.gpu import LayerInputs

        bases = split_basis(self.k_basis), split_basis(self.v_basis)
        group = len(self.v_basis) // len(self.k_basis)
        return LayerInputs((*bases, *self.rotation.tables, group))

    def _group(self, heads: Tensor) -> Tensor:
        """Concatenate heads: ``[p, kv_heads, n, a]`` to ``[p, groups, n, g * a]``."""
        count, kv_heads, n, width = heads.shape
        groups = len(self.k_basis)
        split = heads.reshape(count, groups, kv_heads // groups, n, width)
        return split.transpose(2, 3).flatten(3)

    def _ungroup(self, latents: Tensor, kv_heads: int) -> Tensor:
        """Split groups: ``[p, groups, n, g * a]`` to ``[p, kv_heads, n, a]``."""
        count, groups, n, width = latents.shape
        size = kv_heads // groups
        return latents.view(count, groups, n, size, width // size).transpose(2, 3).flatten(1, 2)


class PaluFormat(CalibratedFormat[PaluLayer]):
    """Format `palu`; artifacts are results of `runtime.kv.palu.calibrate`."""

    name = NAME
    version = VERSION
    keeps_rope = False

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        found, kv_heads = self._layers[layer], self._config.num_kv_heads
        k_width = found.k_basis.shape[0] * found.k_basis.shape[2] // kv_heads
        return tuple(
            Plane(name, torch.bfloat16, (kv_heads, page_size, width))
            for name, width in (("k", k_width), ("v", found.v_basis.shape[2]))
        )

    def describe(self, layer: int) -> str:
        found = self._layers[layer]
        groups, _, k_width = found.k_basis.shape
        size = self._config.num_kv_heads // groups
        return f"K {groups} x {k_width} for {size} heads each, V {found.v_basis.shape[2]} per head"

    def kernel_source(self) -> "KernelSource":
        """See `CalibratedFormat`."""
        from runtime.kv.kernel_source import EncodeSource, KernelSource
        from runtime.kv.palu import kernels

        group = self._config.num_kv_heads // len(self._layers[0].k_basis)
        return KernelSource(
            EncodeSource(kernels.encode, tokens=32, warps=4, stages=2),
            kernels.ATTEND[group],
            kernels.finish,
            tile=64,
            warps=4,
            programs=2,
            latents=True,
        )

    def _read_layers(self, artifact: Artifact, device: torch.device | str) -> list[PaluLayer]:
        config = self._config
        rotation = PageRotation(config, device)
        layers = []
        for index in range(config.num_layers):
            k_basis = artifact.tensor(f"k_basis.{index}", (None, None, None))
            v_basis = artifact.tensor(
                f"v_basis.{index}", (config.all_kv_heads, config.head_dim, None)
            )
            _check_groups(index, k_basis, config)
            if not 0 < v_basis.shape[2] <= config.head_dim:
                raise CalibrationError(
                    f"calibration of {NAME}: 'v_basis.{index}' has rank {v_basis.shape[2]}, "
                    f"expected 1 to {config.head_dim}"
                )
            heads = config.kv_heads
            groups = _groups_of(heads, config.all_kv_heads // len(k_basis))
            bases = k_basis[groups].to(device), v_basis[heads.start : heads.stop].to(device)
            layers.append(PaluLayer(*bases, rotation, self.kernels))
        self.fused = _kernels_support(layers, config)
        return layers


def _kernels_support(layers: list[PaluLayer], config: ModelConfig) -> bool:
    """Return whether the Triton kernels support the bases: equal groups, and aligned latents."""
    dim = config.head_dim
    groups = {len(layer.k_basis) for layer in layers}
    widths = {layer.v_basis.shape[2] for layer in layers}
    widths |= {
        layer.k_basis.shape[2] * len(layer.k_basis) // config.num_kv_heads for layer in layers
    }
    return (
        len(groups) == 1
        and config.num_kv_heads // min(groups) <= _MAX_FUSED_GROUP
        and dim & (dim - 1) == 0
        and 32 <= dim <= _MAX_FUSED_DIM
        and not any(width % _ALIGNED for width in widths)
    )


def _groups_of(heads: range, size: int) -> slice:
    """Return the groups of ``size`` KV heads that consist of ``heads``.

    Raises:
        KVFormatError: a group has other heads, too.
    """
    if heads.start % size or heads.stop % size:
        raise KVFormatError(
            f"KV format {NAME} stores K of groups of {size} KV heads together, but a rank of this "
            f"worker has KV heads {heads.start} to {heads.stop - 1}: calibrate with smaller "
            "--group-heads, or use fewer ranks"
        )
    return slice(heads.start // size, heads.stop // size)


def _check_groups(layer: int, basis: Tensor, config: ModelConfig) -> None:
    groups, inputs, rank = basis.shape
    whole = groups > 0 and config.all_kv_heads % groups == 0
    size = config.all_kv_heads // groups if whole else 0
    if not whole or inputs != size * config.head_dim or rank % size or not 0 < rank <= inputs:
        raise CalibrationError(
            f"calibration of {NAME}: 'k_basis.{layer}' is {list(basis.shape)}, which does not fit "
            f"{config.all_kv_heads} KV heads of {config.head_dim}"
        )
