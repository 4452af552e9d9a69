"""Stored pages of `shard`: encoding and decoding in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.errors import CalibrationError, KVFormatError
from runtime.kv.calibration import Artifact, CalibratedFormat
from runtime.kv.calibration.projection import project_pages
from runtime.kv.format import Plane
from runtime.kv.lloyd_max import BITS as V_BITS
from runtime.kv.lloyd_max import dequantize_values, quantize_values
from runtime.kv.rotation import PageRotation
from runtime.kv.shard import codebook
from runtime.kv.shard.calibrate import NAME, VERSION
from runtime.kv.shard.codes import Run, decode_coefficients, encode_coefficients, runs_of
from runtime.kv.transforms import check_transformable


@dataclass(frozen=True)
class ShardLayer:
    """Implements `runtime.kv.compressed.CompressedLayer`.

    Attributes:
        k_mean: fp32 ``[kv_heads * dim]``, mean of K before RoPE.
        k_basis: fp32 ``[kv_heads * dim, rank]``.
        k_scale: fp32 ``[rank]``, value of one quantization step.
        k_runs: bits of the coefficients.
        rotation: RoPE of the model.
        v_book: fp32 ``[256, 4]``, codebook of V, or None for scalar codes.
    """

    k_mean: Tensor
    k_basis: Tensor
    k_scale: Tensor
    k_runs: tuple[Run, ...]
    rotation: PageRotation
    v_book: Tensor | None = None

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
        packed = encode_coefficients(coefficients, self.k_scale, self.k_runs)  # [p, n, bytes]
        kv_heads, width = k_plane.shape[1], k_plane.shape[3]
        padded = pad(packed, (0, kv_heads * width - packed.shape[-1]))
        # [p, n, kv_heads * width] -> [p, kv_heads, n, width]
        k_plane[targets] = padded.view(*packed.shape[:2], kv_heads, width).transpose(1, 2)
        if self.v_book is None:
            v_plane[targets], norm_plane[targets] = quantize_values(values)
        else:
            v_plane[targets], norm_plane[targets] = codebook.quantize(values, self.v_book)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k_plane, v_plane, norm_plane = planes
        kv_heads, dim = k_plane.shape[1], v_plane.shape[3] * 8 // V_BITS
        stored = k_plane[pages].transpose(1, 2).flatten(2)  # [p, n, kv_heads * width]
        coefficients = decode_coefficients(stored, self.k_scale, self.k_runs)
        tokens = project_pages(coefficients[:, None], self.k_basis.mT[None])[:, 0] + self.k_mean
        unrotated = tokens.view(*tokens.shape[:2], kv_heads, dim).transpose(1, 2)
        v_stored = v_plane[pages], norm_plane[pages]
        if self.v_book is None:
            values = dequantize_values(*v_stored)
        else:
            values = codebook.dequantize(*v_stored, self.v_book)
        return self.rotation.apply(unrotated, first_positions), values


class ShardFormat(CalibratedFormat[ShardLayer]):
    """Format `shard`; artifacts are results of `runtime.kv.shard.calibrate`."""

    name = NAME
    version = VERSION

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        heads, dim = self._config.num_kv_heads, self._config.head_dim
        k_bytes = -(-self._layers[layer].k_runs[-1].stored.stop // heads)
        return (
            Plane("k", torch.uint8, (heads, page_size, k_bytes), encodable=False),
            Plane("v", torch.uint8, (heads, page_size, dim * V_BITS // 8), encodable=False),
            Plane("v_norm", torch.bfloat16, (heads, page_size, 1), encodable=False),
        )

    def describe(self, layer: int) -> str:
        found = self._layers[layer]
        keys = " + ".join(
            f"{run.coefficients.stop - run.coefficients.start} x {run.bits}" for run in found.k_runs
        )
        values = f"{V_BITS} bits" if found.v_book is None else f"{codebook.ENTRIES} vectors"
        return f"K {keys} bits, V {values}"

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
            mean = artifact.tensor(f"k_mean.{index}", (heads * dim,))
            scale = artifact.tensor(f"k_scale.{index}", (rank,))
            bits = artifact.tensor(f"k_bits.{index}", (rank,), torch.int64)
            try:
                runs = runs_of(bits.tolist())
            except CalibrationError as error:
                raise CalibrationError(f"calibration of {NAME}, layer {index}: {error}") from error
            book = None
            if f"v_book.{index}" in artifact.tensors:
                shape = codebook.ENTRIES, codebook.WIDTH
                book = artifact.tensor(f"v_book.{index}", shape).to(device)
            tensors = mean.to(device), basis.to(device), scale.to(device)
            layers.append(ShardLayer(*tensors, runs, rotation, book))
        return layers
