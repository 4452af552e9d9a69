"""Launches the kernel of ragged attention for Hopper GPUs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from runtime.config import EncoderConfig
from runtime.encoder.batch import RaggedBatch
from runtime.encoder.kernels.attention_hopper import DIM, QUERIES, ROWS, ragged_attention_kernel

_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Tile:
    """Tile of the kernel.

    Attributes:
        keys, slots: keys of a tile, and tiles in shared memory.
        registers: registers of a thread of the second warp group.
        launched: registers of a thread at launch; None for as many as fit with one program per
            multiprocessor.
    """

    keys: int
    slots: int
    registers: int
    launched: int | None


TILES = (Tile(128, 4, 240, None), Tile(64, 4, 104, 80), Tile(64, 6, 240, None))


class HopperRaggedAttention:
    """Attention in bf16 with heads of 64 dimensions, on a Hopper GPU."""

    def __init__(self, config: EncoderConfig, tile: Tile) -> None:
        self._heads, self._tile = config.num_heads, tile
        self._scale = math.log2(math.e) / math.sqrt(config.head_dim)

    @staticmethod
    def supports(config: EncoderConfig, device: torch.device) -> bool:
        """Return whether the kernel can be used for a model on a device."""
        return (
            config.head_dim == DIM.value
            and device.type == "cuda"
            and torch.cuda.get_device_capability(device) == _CAPABILITY
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: RaggedBatch,
        out: Tensor,
        q_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Tensor:
        """See `runtime.encoder.gpu.TritonRaggedAttention.attend`. All values are finite."""
        inputs, tile = len(batch.lengths), self._tile
        if inputs:
            ragged_attention_kernel[(len(q) // QUERIES.value + 1 + inputs, self._heads)](
                _descriptor(q, ROWS.value), _descriptor(k, tile.keys), _descriptor(v, tile.keys),
                q_bias, v_bias, batch.starts, inputs, out, out.stride(0), self._scale,
                KEYS=tile.keys, SLOTS=tile.slots, REGISTERS=tile.registers, num_warps=4,
                maxnreg=tile.launched,
            )  # fmt: skip
        return out


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(x, [rows, DIM.value], layout)
