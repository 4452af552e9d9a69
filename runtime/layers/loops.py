"""Compiled loops of a decoder layer on the CPU, in fp32. Loops only: callers prepare arguments.

As in `runtime.compiled`, a row's result is defined by the order of operations as written, so it is
the same bits in any batch.
"""

import numpy as np

from runtime.compiled import Floats, compiled, exp, fma

LANES = 16
BLOCK, K_ALIGNMENT = 64, 16  # output rows of a block of oneDNN's layout; what columns are padded to
_f = np.float32


@compiled
def block_gemv(blocks: Floats, x: Floats, k_block: int, y: Floats) -> None:
    """``y = W x`` for one row, summed as oneDNN sums several: in order within blocks of k.

    Args:
        blocks: `[b, k, BLOCK]`, where `[b, k, l]` is ``W[b * BLOCK + l, k]``; out is padded to
            whole blocks, and in to a multiple of K_ALIGNMENT.
        x: `[in]`.
        k_block: columns that are summed before they join the total.
        y: `[out]`, written.
    """
    columns, rows = len(x), len(y)
    part, total = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for b in range(blocks.shape[0]):
        for first in range(0, columns, k_block):
            end = min(columns, first + k_block)
            whole = first + (end - first) // 4 * 4
            for lane in range(BLOCK):
                part[lane] = _f(0.0)
            for k in range(first, whole, 4):
                x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
                for lane in range(BLOCK):
                    a = fma(blocks[b, k, lane], x0, part[lane])
                    a = fma(blocks[b, k + 1, lane], x1, a)
                    a = fma(blocks[b, k + 2, lane], x2, a)
                    part[lane] = fma(blocks[b, k + 3, lane], x3, a)
            for k in range(whole, end):
                for lane in range(BLOCK):
                    part[lane] = fma(blocks[b, k, lane], x[k], part[lane])
            for lane in range(BLOCK):
                total[lane] = part[lane] if first == 0 else total[lane] + part[lane]
        for lane in range(min(BLOCK, rows - b * BLOCK)):
            y[b * BLOCK + lane] = total[lane]


@compiled
def rms_norm(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """``x / sqrt(mean(x²) + eps) · weight`` for each row of `[n, d]`, into ``out``."""
    width = x.shape[1]
    whole = width // LANES * LANES
    sums = np.empty(LANES, np.float32)
    for row in range(x.shape[0]):
        for lane in range(LANES):
            sums[lane] = _f(0.0)
        for first in range(0, whole, LANES):
            for lane in range(LANES):
                value = x[row, first + lane]
                sums[lane] = fma(value, value, sums[lane])
        square = _f(0.0)
        for lane in range(LANES):
            square += sums[lane]
        for i in range(whole, width):
            square = fma(x[row, i], x[row, i], square)
        scale = _f(1.0) / np.sqrt(square / _f(width) + eps)
        for i in range(width):
            out[row, i] = x[row, i] * scale * weight[i]


@compiled
def silu_mul(gate_up: Floats, out: Floats) -> None:
    """``silu(gate) · up`` for rows `[gate | up]` of `[n, 2 d]`, into ``out`` `[n, d]`."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(width):
            gate = gate_up[row, i]
            small = exp(-abs(gate))
            sigmoid = (_f(1.0) if gate >= _f(0.0) else small) / (_f(1.0) + small)
            out[row, i] = gate * sigmoid * gate_up[row, width + i]
