"""Messages of `RankGroup.sum_normed` on a GPU, one Triton launch each."""

import triton
from torch import Tensor

from runtime.kernels.alignment import round_up
from runtime.kernels.overlap import overlapped
from runtime.parallel.normed import pack_kernel, scale_kernel

_BLOCK = 1024


def pack(addend: Tensor, x: Tensor, rank: int, size: int) -> Tensor:
    """Return the message of a rank, bf16 `[n, w + 2 size]` padded with columns for alignment.

    Args:
        addend: bf16 `[n, w]`, contiguous.
        x: bf16 `[n, h]`, contiguous.
        rank, size: number of this rank, and of all ranks.
    """
    rows, width = addend.shape
    message = addend.new_empty(rows, round_up(width + 2 * size))
    if rows:
        pack_kernel[(rows,)](
            addend, x, message, width, x.shape[1], message.shape[1], rank, BLOCK=_BLOCK,
            **overlapped(x.device),
        )  # fmt: skip
    return message


def scaled(message: Tensor, width: int, size: int, elements: int, eps: float) -> Tensor:
    """Return ``width`` columns of the sum of all ranks' messages, divided by the rms.

    Args:
        size: number of ranks.
        elements, eps: see `RankGroup.sum_normed`.
    """
    y = message.new_empty(len(message), width)
    if len(y):
        scale_kernel[(len(y), triton.cdiv(width, _BLOCK))](
            message, y, width, message.shape[1], elements, eps,
            PLACES=triton.next_power_of_2(2 * size), USED=2 * size, BLOCK=_BLOCK,
            **overlapped(y.device),
        )  # fmt: skip
    return y
