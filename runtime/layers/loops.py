"""Compiled loops of a decoder layer on the CPU, in fp32. Loops only: callers prepare arguments.

As in `runtime.compiled`, a row's result is defined by the order of operations as written, so it is
the same bits in any batch.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.compiled import Floats, as_bits, as_float, compiled, exp, fma

LANES = 16
BLOCK, K_ALIGNMENT = 64, 16  # output rows of a block of oneDNN's layout; what columns are padded to
GROUP = 32  # columns that share a scale and an offset
Bytes = NDArray[np.uint8]
_f, _u = np.float32, np.uint32


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
def coded_gemm(
    codes: Bytes, scales: Floats, offsets: Floats, x: Floats, k_block: int, y: Floats
) -> None:
    """``y = x W^T`` for a few rows, in the order of `block_gemv`, W from its exact codes.

    Args:
        codes: u8 `[b, in, BLOCK]`; scales, offsets: `[b, in / GROUP, BLOCK]`, where ``W[b * BLOCK +
            l, k]`` is ``scale · code + offset`` rounded once.
        x: `[n, in]`, in a multiple of GROUP.
        k_block: columns that are summed before they join the total, a multiple of GROUP.
        y: `[n, out]`, written.
    """
    rows, columns, outputs = x.shape[0], x.shape[1], y.shape[1]
    part, total = np.empty((rows, BLOCK), np.float32), np.empty((rows, BLOCK), np.float32)
    w = np.empty((8, BLOCK), np.float32)
    for b in range(codes.shape[0]):
        for first in range(0, columns, k_block):
            end = min(columns, first + k_block)
            for r in range(rows):
                for lane in range(BLOCK):
                    part[r, lane] = _f(0.0)
            for k in range(first, end, 8):
                g = k // GROUP
                for u in range(8):
                    for lane in range(BLOCK):
                        code = _f(codes[b, k + u, lane])
                        w[u, lane] = fma(scales[b, g, lane], code, offsets[b, g, lane])
                for r in range(rows):
                    x0, x1, x2, x3 = x[r, k], x[r, k + 1], x[r, k + 2], x[r, k + 3]
                    x4, x5, x6, x7 = x[r, k + 4], x[r, k + 5], x[r, k + 6], x[r, k + 7]
                    for lane in range(BLOCK):
                        a = fma(w[1, lane], x1, fma(w[0, lane], x0, part[r, lane]))
                        a = fma(w[3, lane], x3, fma(w[2, lane], x2, a))
                        a = fma(w[5, lane], x5, fma(w[4, lane], x4, a))
                        part[r, lane] = fma(w[7, lane], x7, fma(w[6, lane], x6, a))
            for r in range(rows):
                for lane in range(BLOCK):
                    total[r, lane] = part[r, lane] if first == 0 else total[r, lane] + part[r, lane]
        for r in range(rows):
            for lane in range(min(BLOCK, outputs - b * BLOCK)):
                y[r, b * BLOCK + lane] = total[r, lane]


@compiled
def find_codes(
    weight: Floats, levels: int, signed: bool, codes: Bytes, scales: Floats, offsets: Floats
) -> bool:
    """Write the codes of a weight for `coded_gemm`; False as soon as one would not be exact.

    Args:
        weight: `[out, in]`, in a multiple of GROUP.
        levels: the largest code of a group, counted from its smallest element; or, if ``signed``,
            the magnitude that its largest element has, with 0 in the middle.
    """
    for row in range(weight.shape[0]):
        b, lane = row // BLOCK, row % BLOCK
        for g in range(weight.shape[1] // GROUP):
            low, high = weight[row, g * GROUP], weight[row, g * GROUP]
            for k in range(g * GROUP, (g + 1) * GROUP):
                low, high = min(low, weight[row, k]), max(high, weight[row, k])
            span = max(high, -low) if signed else high - low
            # To the 11 bits that half precision has: files keep scales so.
            bits = as_bits(_f(span / _f(levels)))
            bits = (bits + _u(0xFFF) + ((bits >> _u(13)) & _u(1))) & _u(0xFFFFE000)
            scale = as_float(bits)
            offset = scale * _f(-levels - 1) if signed else low
            scales[b, g, lane], offsets[b, g, lane] = scale, offset
            for k in range(g * GROUP, (g + 1) * GROUP):
                value = weight[row, k]
                code = _f(0.0) if scale == _f(0.0) else np.rint((value - offset) / scale)
                if not (_f(0.0) <= code <= _f(255.0)) or fma(scale, code, offset) != value:
                    return False
                codes[b, k, lane] = np.uint8(code)
    return True


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
