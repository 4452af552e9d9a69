"""Compiled loops of attention on the CPU. Loops only: `cpu.py` prepares their arguments.

Every result is defined by the order of IEEE operations as written (no fast-math; fused
multiply-adds are explicit), so that neither the batch, nor the chunks of a prompt, nor the width of
the lanes changes a bit of it. Each lane is one query head of one token; lanes never mix.

Arguments that recur:
    k_pages, v_pages: u16 `[page, kv_head, slot, dim]`, bf16 patterns.
    page_table: int32 `[s, p]`; starts: int32 `[s + 1]`; lengths: int32 `[s]`, see `base.Batch`.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.cpu.jit import Floats, Halves, as_bits, as_float, compiled, exp
from runtime.cpu.tiles import LANES, accumulate, prefetch, transpose

Ints = NDArray[np.int32]
_f, _u = np.float32, np.uint32


@compiled
def _to_bf16(value: np.float32) -> np.uint16:
    """Round to nearest, ties to even; every NaN becomes the quiet one."""
    bits = as_bits(value)
    if value != value:
        return np.uint16(0x7FC0)
    return np.uint16((bits + _u(0x7FFF) + ((bits >> _u(16)) & _u(1))) >> _u(16))


@compiled
def write(
    qkv: Floats,
    cos: Floats,
    sin: Floats,
    k_pages: Halves,
    v_pages: Halves,
    page_table: Ints,
    starts: Ints,
    lengths: Ints,
    q_out: Floats,
) -> None:
    """RoPE on q and k, then k and v into the pages.

    Args:
        qkv: `[n, heads + 2 kv_heads, dim]`.
        cos, sin: `[context, dim / 2]`.
        q_out: `[n, heads, dim]`, written.
    """
    heads, dim = q_out.shape[1], q_out.shape[2]
    kv_heads, size = k_pages.shape[1], k_pages.shape[2]
    half = dim // 2
    for s in range(len(lengths)):
        for row in range(starts[s], starts[s + 1]):
            position = lengths[s] - starts[s + 1] + row
            page, slot = page_table[s, position // size], position % size
            for h in range(heads):
                for d in range(half):
                    first, second = qkv[row, h, d], qkv[row, h, d + half]
                    c, sn = cos[position, d], sin[position, d]
                    q_out[row, h, d] = first * c - second * sn
                    q_out[row, h, d + half] = second * c + first * sn
            for h in range(kv_heads):
                for d in range(half):
                    first, second = qkv[row, heads + h, d], qkv[row, heads + h, d + half]
                    c, sn = cos[position, d], sin[position, d]
                    k_pages[page, h, slot, d] = _to_bf16(first * c - second * sn)
                    k_pages[page, h, slot, d + half] = _to_bf16(second * c + first * sn)
                for d in range(dim):
                    v_pages[page, h, slot, d] = _to_bf16(qkv[row, heads + kv_heads + h, d])


@compiled
def attend(
    q: Floats,
    k_pages: Halves,
    v_pages: Halves,
    page_table: Ints,
    starts: Ints,
    lengths: Ints,
    scale: np.float32,
    out: Floats,
) -> None:
    """Causal softmax(q·k·scale)·v with an online softmax, a page at a time.

    LANES query rows are computed side by side.

    Args:
        q: `[n, heads, dim]`.
        out: `[n, heads, dim]`, written.
    """
    kv_heads, size, dim = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
    group = q.shape[1] // kv_heads
    queries = np.empty((dim, LANES), np.float32)
    mixed = np.empty((dim, LANES), np.float32)
    weights = np.empty((size, LANES), np.float32)
    keys, values = np.empty((size, dim), np.float32), np.empty((size, dim), np.float32)
    peak, rescale = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    total = np.empty(LANES, np.float32)
    position = np.empty(LANES, np.int32)
    for s in range(len(lengths)):
        rows = (starts[s + 1] - starts[s]) * group
        before = lengths[s] - (starts[s + 1] - starts[s])
        for h in range(kv_heads):
            for block in range(0, rows, LANES):
                for r in range(LANES):
                    row = min(block + r, rows - 1)  # spare lanes repeat the last row
                    token, head = starts[s] + row // group, h * group + row % group
                    position[r] = before + row // group
                    peak[r], total[r] = _f(-np.inf), _f(0.0)
                    for d in range(dim):
                        queries[d, r] = q[token, head, d] * scale
                        mixed[d, r] = _f(0.0)
                end = position[LANES - 1] + 1
                for p in range((end + size - 1) // size):
                    page, first = page_table[s, p], p * size
                    count = min(size, end - first)
                    for j in range(count):
                        for d in range(dim):
                            keys[j, d] = as_float(_u(k_pages[page, h, j, d]) << _u(16))
                        for d in range(dim):
                            values[j, d] = as_float(_u(v_pages[page, h, j, d]) << _u(16))
                        for r in range(LANES):
                            weights[j, r] = _f(0.0)
                    accumulate(weights[:count], keys, 0, queries, 0, dim)
                    for r in range(LANES):
                        rescale[r] = peak[r]
                    for j in range(count):
                        for r in range(LANES):
                            seen = first + j <= position[r]
                            x = weights[j, r] if seen else _f(-np.inf)
                            weights[j, r] = x
                            peak[r] = x if x > peak[r] else peak[r]
                    for r in range(LANES):
                        rescale[r] = exp(rescale[r] - peak[r])
                        total[r] *= rescale[r]
                    for j in range(count):
                        for r in range(LANES):
                            x = exp(weights[j, r] - peak[r])
                            weights[j, r] = x
                            total[r] += x
                    for d in range(dim):
                        for r in range(LANES):
                            mixed[d, r] *= rescale[r]
                    accumulate(mixed, values.T, 0, weights, 0, count)
                for r in range(min(LANES, rows - block)):
                    row = block + r
                    token, head = starts[s] + row // group, h * group + row % group
                    for d in range(dim):
                        out[token, head, d] = mixed[d, r] / total[r]


@compiled
def attend_last(
    q: Floats,
    k_pages: Halves,
    v_pages: Halves,
    page_table: Ints,
    lengths: Ints,
    scale: np.float32,
    out: Floats,
) -> None:
    """`attend` where each sequence has one row, to the same bits: keys are the lanes of scores, and
    dimensions those of the result.

    Args:
        k_pages, v_pages: of a page size that divides LANES.
        q, out: `[s, heads, dim]`.
    """
    kv_heads, size, dim = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
    group = q.shape[1] // kv_heads
    strips = (dim + LANES - 1) // LANES
    queries = np.empty((group, dim), np.float32)
    keys = np.empty((dim, LANES), np.float32)
    values = np.zeros((strips, size, LANES), np.float32)
    scores = np.empty((group, LANES), np.float32)
    mixed = np.empty((strips, group, LANES), np.float32)
    peak, total = np.empty(group, np.float32), np.empty(group, np.float32)
    for s in range(len(lengths)):
        for h in range(kv_heads):
            for g in range(group):
                peak[g], total[g] = _f(-np.inf), _f(0.0)
                for d in range(dim):
                    queries[g, d] = q[s, h * group + g, d] * scale
            mixed[:] = _f(0.0)
            for start in range(0, lengths[s], LANES):
                end = min(start + LANES, lengths[s])
                # Where it goes on after this stretch: pages lie too far apart for the processor to
                # find that out, so they are asked for one by one on the way.
                then, then_head, then_start = s, h, end
                if end == lengths[s]:
                    then, then_head, then_start = s + (h + 1) // kv_heads, (h + 1) % kv_heads, 0
                then_length = lengths[then] if then < len(lengths) else 0
                for first in range(start, end, size):
                    transpose(k_pages[page_table[s, first // size], h], keys, first - start)
                scores[:] = _f(0.0)
                accumulate(scores, queries, 0, keys, 0, dim)
                for first in range(start, end, size):
                    count, at = min(size, end - first), first - start
                    if then_start + at < then_length:
                        soon = page_table[then, (then_start + at) // size]
                        prefetch(k_pages, soon, then_head)
                        prefetch(v_pages, soon, then_head)
                    page = v_pages[page_table[s, first // size], h]
                    for j in range(count):
                        for strip in range(strips):
                            for d in range(min(LANES, dim - strip * LANES)):
                                bits = _u(page[j, strip * LANES + d]) << _u(16)
                                values[strip, j, d] = as_float(bits)
                    for g in range(group):
                        top = peak[g]
                        for j in range(at, at + count):
                            top = scores[g, j] if scores[g, j] > top else top
                        for j in range(at, at + count):
                            scores[g, j] = exp(scores[g, j] - top)
                        rescale = exp(peak[g] - top)
                        together = total[g] * rescale
                        for j in range(at, at + count):
                            together += scores[g, j]
                        peak[g], total[g] = top, together
                        for strip in range(strips):
                            for d in range(LANES):
                                mixed[strip, g, d] *= rescale
                    for strip in range(strips):
                        accumulate(mixed[strip], scores, at, values[strip], 0, count)
            for g in range(group):
                for d in range(dim):
                    out[s, h * group + g, d] = mixed[d // LANES, g, d % LANES] / total[g]
