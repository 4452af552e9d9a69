"""Compiled fp32 loops of a decoder layer on the CPU. Callers check and prepare the arguments.

As in `runtime.cpu.jit`, operations are executed in the order written, so that a row's result is
bitwise identical in any batch.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from runtime.cpu.jit import Bytes, Floats, Halves, as_bits, as_float, compiled, exp, fma
from runtime.cpu.tiles import GROUP, LANES, accumulate

Source = Floats | Halves | tuple[Bytes, Floats, Floats]
"""Weight `[out, in]` in `b` blocks of LANES rows, the last one padded. It is one of:

- fp32 or bf16 patterns `[b, in, LANES]`;
- u8 codes `[b, in, LANES]` with fp32 scales and offsets `[b, in / GROUP, LANES]`.

A block is a right-hand operand of `runtime.cpu.tiles.accumulate`.
"""

K_BLOCK = 1024
"""Columns of a weight whose products are summed before the sum is added to the output. oneDNN does
the same for most weights, and is used for those.
"""
_SUMS = 16
"""Number of partial sums in `rms_norm`."""
_f, _u = np.float32, np.uint32


def _add_block(part: Floats, x: Floats, source: Source, b: int, first: int, end: int) -> None:
    """Add ``x[:, first:end] @ block[first:end]`` of block ``b`` to ``part`` `[n, LANES]`."""
    raise NotImplementedError("available in compiled code only")


def _choose_block(part: Any, x: Any, source: Any, b: Any, first: Any, end: Any) -> Any:  # noqa: ARG001 - `_add_block`'s arguments
    """Return the implementation of `_add_block` for a type of source, at compile time."""

    def add_codes(part: Any, x: Any, source: Any, b: Any, first: Any, end: Any) -> None:
        codes, scales, offsets = source
        block = (codes[b], scales[b], offsets[b])
        for k in range(first, end, GROUP):
            accumulate(part, x, k, block, k, GROUP)

    def add(part: Any, x: Any, source: Any, b: Any, first: Any, end: Any) -> None:
        accumulate(part, x, first, source[b], first, end - first)

    return add if isinstance(source, types.Array) else add_codes


overload(_add_block)(_choose_block)


def _expand_block(source: Source, b: int, columns: int, out: Floats) -> None:
    """Write the first ``columns`` columns of block ``b`` to ``out`` `[columns, LANES]`."""
    raise NotImplementedError("available in compiled code only")


def _choose_expansion(source: Any, b: Any, columns: Any, out: Any) -> Any:  # noqa: ARG001 - `_expand_block`'s arguments
    """Return the implementation of `_expand_block` for a type of source, at compile time."""

    def expand_codes(source: Any, b: Any, columns: Any, out: Any) -> None:
        codes, scales, offsets = source
        for k in range(columns):
            row, scale, offset = codes[b, k], scales[b, k // GROUP], offsets[b, k // GROUP]
            for lane in range(LANES):
                out[k, lane] = fma(scale[lane], _f(row[lane]), offset[lane])

    def expand_bf16(source: Any, b: Any, columns: Any, out: Any) -> None:
        for k in range(columns):
            for lane in range(LANES):
                out[k, lane] = as_float(_u(source[b, k, lane]) << _u(16))

    return expand_bf16 if isinstance(source, types.Array) else expand_codes


overload(_expand_block)(_choose_expansion)


@compiled
def linear(source: Source, blocks: int, x: Floats, y: Floats) -> None:
    """Compute ``y = x W^T``. The products of K_BLOCK columns are summed before they are added.

    Args:
        source: the weight.
        blocks: number of blocks of LANES rows of the weight.
        x: fp32 `[n, in]`.
        y: fp32 `[n, out]`, written.
    """
    rows, columns, outputs = x.shape[0], x.shape[1], y.shape[1]
    part = np.empty((rows, LANES), np.float32)  # sum over K_BLOCK columns
    acc = np.empty((rows, LANES), np.float32)
    for b in range(blocks):
        for first in range(0, columns, K_BLOCK):
            for r in range(rows):
                for lane in range(LANES):
                    part[r, lane] = _f(0.0)
            _add_block(part, x, source, b, first, min(columns, first + K_BLOCK))
            for r in range(rows):
                for lane in range(LANES):
                    acc[r, lane] = part[r, lane] if first == 0 else acc[r, lane] + part[r, lane]
        for r in range(rows):
            for lane in range(min(LANES, outputs - b * LANES)):
                y[r, b * LANES + lane] = acc[r, lane]


@compiled
def linear_expanded(source: Source, blocks: int, x: Floats, y: Floats) -> None:
    """Compute `linear`, faster for many rows of codes or bf16: each block is expanded once."""
    block = np.empty((1, x.shape[1], LANES), np.float32)
    for b in range(blocks):
        _expand_block(source, b, x.shape[1], block[0])
        linear(block, 1, x, y[:, b * LANES : (b + 1) * LANES])


@compiled
def expand(source: Source, first_block: int, columns: int, out: Floats) -> None:
    """Write consecutive blocks of a weight stored as codes or bf16 patterns as fp32.

    Args:
        source: the weight `[out, in]`.
        first_block: the first block to write.
        columns: ``in``; further columns of ``out`` are not written.
        out: fp32 `[blocks, columns, LANES]`, written.
    """
    for b in range(out.shape[0]):
        _expand_block(source, first_block + b, columns, out[b])


@compiled
def find_codes(
    weight: Floats, levels: int, signed: bool, codes: Bytes, scales: Floats, offsets: Floats
) -> bool:
    """Represent a weight exactly by codes, scales and offsets, if possible.

    Args:
        weight: fp32 `[out, in]`, where ``in`` is a multiple of GROUP.
        levels: number of quantization steps: from a group's smallest to its largest element, or, if
            ``signed``, from 0 to the largest magnitude.
        signed: whether steps are symmetric around 0, as in Q8_0.
        codes: u8 `[b, in, LANES]`, written.
        scales, offsets: fp32 `[b, in / GROUP, LANES]`, written.

    Returns:
        False if some element cannot be represented exactly; the outputs are then incomplete.
    """
    for row in range(weight.shape[0]):
        b, lane = row // LANES, row % LANES
        for g in range(weight.shape[1] // GROUP):
            low, high = weight[row, g * GROUP], weight[row, g * GROUP]
            for k in range(g * GROUP, (g + 1) * GROUP):
                low, high = min(low, weight[row, k]), max(high, weight[row, k])
            span = max(high, -low) if signed else high - low
            # Files store scales as fp16, so round to its 11 significant bits.
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
    """Compute ``x / sqrt(mean(x²) + eps) · weight`` for each row of `[n, d]`, into ``out``."""
    width = x.shape[1]
    whole = width // _SUMS * _SUMS
    sums = np.empty(_SUMS, np.float32)
    for row in range(x.shape[0]):
        for lane in range(_SUMS):
            sums[lane] = _f(0.0)
        for first in range(0, whole, _SUMS):
            for lane in range(_SUMS):
                value = x[row, first + lane]
                sums[lane] = fma(value, value, sums[lane])
        square = _f(0.0)
        for lane in range(_SUMS):
            square += sums[lane]
        for i in range(whole, width):
            square = fma(x[row, i], x[row, i], square)
        scale = _f(1.0) / np.sqrt(square / _f(width) + eps)
        for i in range(width):
            out[row, i] = x[row, i] * scale * weight[i]


@compiled
def silu_mul(gate_up: Floats, out: Floats) -> None:
    """Compute ``silu(gate) · up`` of `[n, 2 d]`, gate first, into ``out`` `[n, d]`."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(width):
            gate = gate_up[row, i]
            small = exp(-abs(gate))
            sigmoid = (_f(1.0) if gate >= _f(0.0) else small) / (_f(1.0) + small)
            out[row, i] = gate * sigmoid * gate_up[row, width + i]
