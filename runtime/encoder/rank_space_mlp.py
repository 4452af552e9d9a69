"""Launches the kernel of the MLP in rank space for Hopper GPUs. The reference is in torch."""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from runtime.encoder.kernels.rank_space_mlp import PANEL, PANEL_BYTES, TOKENS, rank_space_mlp_kernel
from runtime.kernels.alignment import VECTOR_ELEMENTS

_CAPABILITY = (9, 0)
_MAX_PANELS = 5
"""Maximum panels of 64 columns of a rank. The outputs of more would not fit in the registers."""
_SHARED_BYTES, _MAX_SLOTS = 220 << 10, 4
"""Shared memory for inputs and the ring of tiles, and maximum slots of the ring."""
_MIN_OCCUPANCY = 0.7
"""Minimum fraction of multiprocessor time that programs fill, for which the kernel is used."""


class RankSpaceMlp:
    """``V_down gelu(U_up x + b)`` in one launch, without inner activations in memory.

    Args:
        up: U of ``up``, bf16 `[inner, rank]`.
        bias: of ``up``, bf16 `[inner]`.
        down: V of ``down``, bf16 `[width, inner]`.

    Both ranks and ``inner`` are multiples of 8. See `supports`.
    """

    def __init__(self, up: Tensor, bias: Tensor | None, down: Tensor) -> None:
        self._rank, self._inner, self._width = up.shape[1], len(up), len(down)
        self._bias = up.new_zeros(len(up)) if bias is None else bias
        self._up, self._down = _descriptor(up), _descriptor(down)
        self._panels = [triton.cdiv(width, PANEL.value) for width in (self._rank, self._width)]
        self._slots = slots(*self._panels)

    @staticmethod
    def supports(up: Tensor, down: Tensor) -> bool:
        """Return whether the kernel can be used with these factors on their device."""
        return (
            up.is_cuda
            and up.dtype == torch.bfloat16
            and max(up.shape[1], len(down)) <= _MAX_PANELS * PANEL.value
            and all(size % VECTOR_ELEMENTS == 0 for size in (*up.shape, len(down)))
            and torch.cuda.get_device_capability(up.device) == _CAPABILITY
        )

    def fills(self, tokens: int) -> bool:
        """Return whether a call with so many tokens occupies the GPU."""
        programs = triton.cdiv(tokens, TOKENS.value)
        available = _multiprocessors(self._bias.device)
        waves = triton.cdiv(programs, available)
        return bool(programs >= _MIN_OCCUPANCY * waves * available)

    def __call__(self, x: Tensor) -> Tensor:
        """Return bf16 `[n, width]` for bf16 `[n, rank]`, contiguous."""
        y = x.new_empty(len(x), self._width)
        if len(x):
            up, down = self._panels
            rank_space_mlp_kernel[(triton.cdiv(len(x), TOKENS.value),)](
                _descriptor(x), self._up, self._down, self._bias, y, self._inner, len(x),
                self._width, UP=up, DOWN=down, PANELS=max(up, down), SLOTS=self._slots, num_warps=4,
            )  # fmt: skip
        return y


def slots(up: int, down: int) -> int:
    """Return the number of slots of the ring that fit in shared memory.

    Args:
        up, down: panels of the ranks.
    """
    panels = _SHARED_BYTES // PANEL_BYTES.value - 2 * up
    return int(min(_MAX_SLOTS, panels // max(up, down)))


def _descriptor(x: Tensor) -> TensorDescriptor:
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(x, [PANEL.value, PANEL.value], layout)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
