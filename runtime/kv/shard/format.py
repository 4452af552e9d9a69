"""Compressed pages of `shard`: encoding and decoding in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.errors import CalibrationError, KVFormatError
from runtime.kv import two_bits
from runtime.kv.calibration import Artifact, CalibratedFormat
from runtime.kv.calibration.bases import split_basis
from runtime.kv.calibration.projection import project_pages
from runtime.kv.compressed import CompressedLayer
from runtime.kv.format import Plane
from runtime.kv.rotation import PageRotation
from runtime.kv.shard import codebook
from runtime.kv.shard.calibrate import K_BITS, NAME, VERSION
from runtime.kv.shard.codes import LARGEST, Run, decode_steps, encode_coefficients, runs_of
from runtime.kv.shard.decoder import KeyDecoder
from runtime.kv.shard.fragment_inputs import DIMS, TILE, TOKEN, lane_cos_sin, lane_weights
from runtime.kv.transforms import check_transformable
from runtime.kv.two_bits import BITS as V_BITS

if TYPE_CHECKING:  # optional: Triton
    from runtime.kv.gpu import CompressedPageKernels, LayerInputs
    from runtime.kv.kernel_source import KernelSource

_MIN_FUSED_DIM, _MAX_FUSED_DIM = 64, 128
"""Smallest and largest head dimension of the Triton kernels."""


@dataclass(frozen=True)
class ShardLayer(CompressedLayer):
    """Coefficients of K before RoPE, and codes of V.

    Attributes:
        k_mean: fp32 ``[kv_heads * dim]``, mean of K before RoPE.
        k_basis: fp32 ``[kv_heads * dim, rank]``.
        k_scale: fp32 ``[rank]``, value of one quantization step.
        k_runs: bits of the coefficients.
        k_decoder: maps codes to keys before RoPE.
        rotation: RoPE of the model.
        v_book: fp32 ``[256, 4]``, codebook of V, or None for scalar codes.
        format_kernels: returns the Triton kernels, or None if they do not run on a device.
    """

    k_mean: Tensor
    k_basis: Tensor
    k_scale: Tensor
    k_runs: tuple[Run, ...]
    k_decoder: KeyDecoder
    rotation: PageRotation
    v_book: Tensor | None = None
    format_kernels: "Callable[[torch.device], CompressedPageKernels | None]" = lambda _: None

    @property
    def uniform(self) -> bool:
        """Whether all coefficients have 4 bits and V has scalar codes."""
        return self.v_book is None and [run.bits for run in self.k_runs] == [K_BITS]

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        if kernels := self.kernels(keys.device):
            kernels.encode(keys, values, planes, targets, first_positions=first_positions)
        else:
            self.encode_reference(keys, values, first_positions, planes, targets)

    def encode_reference(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        """Encode whole pages in plain torch. The kernels differ only in the order of sums."""
        k_plane, v_plane, norm_plane = planes
        unrotated = self.rotation.undo(keys.float(), first_positions)
        tokens = unrotated.transpose(1, 2).flatten(2) - self.k_mean  # [p, n, kv_heads * dim]
        finite = (tokens.abs() <= LARGEST).all(dim=-1, keepdim=True)
        coefficients = project_pages(tokens[:, None], self.k_basis[None])[:, 0]
        coefficients = coefficients.masked_fill(~finite, torch.nan)
        packed = encode_coefficients(coefficients, self.k_scale, self.k_runs)  # [p, n, bytes]
        kv_heads, width = k_plane.shape[1], k_plane.shape[3]
        padded = pad(packed, (0, kv_heads * width - packed.shape[-1]))
        k_plane[targets] = padded.view(-1, *k_plane.shape[1:])  # the same bytes in another shape
        if self.v_book is None:
            v_plane[targets], norms = two_bits.quantize(values)
        else:
            v_plane[targets], norms = codebook.quantize(values, self.v_book)
        norm_plane[targets] = norms.masked_fill(~finite[:, None], torch.nan)

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k_plane, v_plane, norm_plane = planes
        kv_heads, page_size, width = k_plane.shape[1:]
        dim = v_plane.shape[3] * 8 // V_BITS
        stored = k_plane[pages].view(-1, page_size, kv_heads * width)
        steps = decode_steps(stored, self.k_runs)  # [p, n, rank]
        tokens = project_pages(steps[:, None], self._k_matrix[None])[:, 0] + self.k_mean
        unrotated = tokens.view(*tokens.shape[:2], kv_heads, dim).transpose(1, 2)
        v_stored = v_plane[pages], norm_plane[pages]
        if self.v_book is None:
            values = two_bits.dequantize(*v_stored)
        else:
            values = codebook.dequantize(*v_stored, self.v_book)
        return self.rotation.apply(unrotated, first_positions), values

    @cached_property
    def _k_matrix(self) -> Tensor:
        return self.k_decoder.matrix()

    def kernels(self, device: torch.device) -> "CompressedPageKernels | None":
        """Return the fused kernels, or None if they do not run on a device or for this model."""
        return self._kernels if self.format_kernels(device) else None

    @cached_property
    def _kernels(self) -> "CompressedPageKernels":
        shared = self.format_kernels(self.k_basis.device)
        assert shared is not None, "kernels are used on the device of the bases"
        return shared.of_layer(self.kernel_inputs())

    def kernel_inputs(self) -> "LayerInputs":
        """Return the tensors that attention and encoding read after the compressed planes.

        See `runtime.kv.shard.kernels`.
        """
        from runtime.kv.gpu import LayerInputs

        weights, offsets, unit = self.k_decoder.kernel_inputs()
        kv_heads = len(unit)
        rank = self.k_basis.shape[1]
        own = rank // 2 // kv_heads  # bytes of a token that belong to a KV head
        width = max(16, 1 << (own - 1).bit_length())
        columns = self.k_basis.new_zeros(len(self.k_basis), kv_heads, width, 2)
        columns[:, :, :own] = self.k_basis.view(-1, 2, kv_heads, own).permute(0, 2, 3, 1)
        # Rotated keys include the factor of RoPE. The inverse tables, by which the kernels rotate
        # queries and keys, divide both by it instead.
        factor = unit.new_tensor([self.rotation.factor])
        units = torch.cat((unit * factor**3, factor))
        encoding = split_basis(columns), self.k_mean, self.k_scale
        of_lanes = *lane_weights(self.k_decoder), lane_cos_sin(self.rotation)
        return LayerInputs((weights, offsets, units, *encoding, *self.rotation.inverse, *of_lanes))


class ShardFormat(CalibratedFormat[ShardLayer]):
    """Format `shard`; artifacts are results of `runtime.kv.shard.calibrate`."""

    name = NAME
    version = VERSION
    keeps_rope = False

    def kernel_source(self) -> "KernelSource":
        """See `CalibratedFormat`."""
        from runtime.kv.kernel_source import EncodeSource, FragmentSource, KernelSource
        from runtime.kv.shard import encode_kernels, fragments, kernels

        # With more heads per program, wide bases would exceed shared memory.
        k_bytes = {self.planes(index, 1)[0].shape[2] for index in range(len(self._layers))}
        heads = max(1, 64 // max(16, 1 << (max(k_bytes) - 1).bit_length()))
        by_groups = FragmentSource(
            fragments.attend, fragments.PARTS, TILE, warps=4, programs=3, dims=(DIMS,),
            hopper_only=True,
        )  # fmt: skip
        supported = {size * self._config.num_kv_heads for size in k_bytes} == {TOKEN}
        # Matmuls of tokens by warp groups take 4 warps and 64 tokens.
        return KernelSource(
            EncodeSource(encode_kernels.encode, tokens=32, heads=heads, warps=4, stages=2),
            kernels.attend,
            kernels.finish,
            tile=TILE,
            warps=4,
            stages=5,
            programs=2,
            fragments=by_groups if supported else None,
        )

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
        if heads < config.all_kv_heads:
            raise KVFormatError(
                f"KV format {NAME} stores K of all {config.all_kv_heads} KV heads together, but a "
                f"rank of this worker has only {heads}: use one rank, or another KV format"
            )
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
            decoder = KeyDecoder.of(basis.to(device), scale.to(device), mean.to(device), heads)
            tensors = mean.to(device), basis.to(device), scale.to(device)
            layers.append(ShardLayer(*tensors, runs, decoder, rotation, book, self.kernels))
        self.fused = (
            _MIN_FUSED_DIM <= dim <= _MAX_FUSED_DIM
            and all(layer.uniform for layer in layers)
            and _multiplies_fp8(torch.device(device))
        )
        return layers


def _multiplies_fp8(device: torch.device) -> bool:
    """Return whether fp8 matmuls of the kernels run on a device or in Triton's interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
