"""Stored pages of `shard`: encoding and decoding in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import CalibrationError, KVFormatError
from runtime.kv.calibration import Artifact, CalibratedFormat
from runtime.kv.calibration.projection import project_pages
from runtime.kv.format import Plane
from runtime.kv.lloyd_max import BITS as V_BITS
from runtime.kv.lloyd_max import dequantize_values, quantize_values
from runtime.kv.rotation import PageRotation
from runtime.kv.shard.calibrate import NAME, VERSION
from runtime.kv.transforms import check_transformable, pack, unpack

K_BITS = 4
MAX_STEPS = 7
_ZERO = 8
"""Code c of K stands for ``c - 8`` quantization steps, -7 to 7."""
_NOT_FINITE = 0
"""Code of all coefficients of a token with a coefficient that is not finite."""


@dataclass(frozen=True)
class ShardLayer:
    """Implements `runtime.kv.compressed.CompressedLayer`.

    Attributes:
        k_mean: fp32 ``[kv_heads * dim]``, mean of K before RoPE.
        k_basis: fp32 ``[kv_heads * dim, rank]``.
        k_scale: fp32 ``[rank]``, value of one quantization step.
        rotation: RoPE of the model.
    """

    k_mean: Tensor
    k_basis: Tensor
    k_scale: Tensor
    rotation: PageRotation

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        k_plane, v_plane, norm_plane = planes
        unrotated = self.rotation.undo(keys.float(), first_positions)
        tokens = unrotated.transpose(1, 2).flatten(2) - self.k_mean  # [p, n, kv_heads * dim]
        coefficients = project_pages(tokens[:, None], self.k_basis[None])[:, 0]
        finite = coefficients.isfinite().all(dim=-1, keepdim=True)
        steps = (coefficients / self.k_scale).round().clamp(-MAX_STEPS, MAX_STEPS)
        codes = torch.where(finite, steps + _ZERO, _NOT_FINITE).to(torch.uint8)
        # [p, n, rank / 2] -> [p, kv_heads, n, rank / 2 / kv_heads]
        packed = pack(codes, K_BITS).view(*codes.shape[:2], keys.shape[1], k_plane.shape[3])
        k_plane[targets] = packed.transpose(1, 2)
        v_plane[targets], norm_plane[targets] = quantize_values(values)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k_plane, v_plane, norm_plane = planes
        kv_heads, dim = k_plane.shape[1], v_plane.shape[3] * 8 // V_BITS
        codes = unpack(k_plane[pages].transpose(1, 2).flatten(2), K_BITS)  # [p, n, rank]
        steps = torch.where(codes == _NOT_FINITE, torch.nan, codes.float() - _ZERO)
        coefficients = (steps * self.k_scale)[:, None]
        tokens = project_pages(coefficients, self.k_basis.mT[None])[:, 0] + self.k_mean
        unrotated = tokens.view(*tokens.shape[:2], kv_heads, dim).transpose(1, 2)
        values = dequantize_values(v_plane[pages], norm_plane[pages])
        return self.rotation.apply(unrotated, first_positions), values


class ShardFormat(CalibratedFormat[ShardLayer]):
    """Format `shard`; artifacts are results of `runtime.kv.shard.calibrate`."""

    name = NAME
    version = VERSION

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        heads, dim = self._config.num_kv_heads, self._config.head_dim
        k_bytes = self._layers[layer].k_basis.shape[1] // (2 * heads)
        return (
            Plane("k", torch.uint8, (heads, page_size, k_bytes), encodable=False),
            Plane("v", torch.uint8, (heads, page_size, dim * V_BITS // 8), encodable=False),
            Plane("v_norm", torch.bfloat16, (heads, page_size, 1), encodable=False),
        )

    def describe(self, layer: int) -> str:
        return f"K {self._layers[layer].k_basis.shape[1]} x {K_BITS} bits, V {V_BITS} bits"

    def _read_layers(self, artifact: Artifact, device: torch.device | str) -> list[ShardLayer]:
        config = self._config
        heads, dim = config.num_kv_heads, config.head_dim
        try:
            check_transformable(dim, NAME)
        except ValueError as error:
            raise KVFormatError(str(error)) from error
        rotation = PageRotation(config, device)
        layers = []
        for index in range(config.num_layers):
            basis = artifact.tensor(f"k_basis.{index}", (heads * dim, None))
            rank = basis.shape[1]
            if not rank or rank % (2 * heads):
                raise CalibrationError(
                    f"calibration of {NAME}, layer {index}: rank {rank} is not a multiple of "
                    f"{2 * heads}"
                )
            mean = artifact.tensor(f"k_mean.{index}", (heads * dim,))
            scale = artifact.tensor(f"k_scale.{index}", (rank,))
            tensors = mean.to(device), basis.to(device), scale.to(device)
            layers.append(ShardLayer(*tensors, rotation))
        return layers
