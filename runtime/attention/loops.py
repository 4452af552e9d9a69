"""Compiled CPU attention kernels. `cpu.py` prepares their arguments.

Operations are executed in the order written: there is no fast-math, and fused multiply-adds are
explicit. The result of a query row (one query head of one token) is therefore bitwise identical for
any batch, any chunking of the prompt and any vector width.

Common arguments:
    k_pages, v_pages: u16 `[page, kv_head, slot, dim]`, bf16 bit patterns.
    page_table: int32 `[s, p]`; starts: int32 `[s + 1]`; lengths: int32 `[s]`; see `base.Batch`.
    window: number of last tokens that a token attends to, itself included. Pages without such
        tokens are not read.

Online softmax keeps for each query row the running maximum ``m`` of the scores, the sum ``l`` of
``exp(score - m)``, and the weighted sum ``acc`` of values, not yet divided by ``l``. When ``m``
grows, ``l`` and ``acc`` are multiplied by ``rescale = exp(old m - new m)``. With a
sliding window, the first pages of a block of rows may have no keys for its last rows. ``m``
therefore starts with the least finite number: with -inf, the difference in ``exp`` would be NaN.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.cpu.jit import Floats, Halves, as_bits, as_float, compiled, exp
from runtime.cpu.tiles import LANES, accumulate, prefetch, transpose

Ints = NDArray[np.int32]
_f, _u = np.float32, np.uint32
_LEAST = _f(np.finfo(np.float32).min)


@compiled
def _to_bf16(value: np.float32) -> np.uint16:
    """Round to the nearest bf16, ties to even. Every NaN becomes the quiet NaN 0x7FC0."""
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
    positions: NDArray[np.int64],
    page_table: Ints,
    starts: Ints,
    lengths: Ints,
    q_out: Floats,
) -> None:
    """Apply RoPE to q and k, and write k and v into the pages.

    Args:
        qkv: fp32 `[n, heads + 2 kv_heads, dim]`.
        cos, sin: fp32 `[context, dim / 2]`.
        positions: int64 `[n]`.
        q_out: fp32 `[n, heads, dim]`, written.
    """
    heads, dim = q_out.shape[1], q_out.shape[2]
    kv_heads, size = k_pages.shape[1], k_pages.shape[2]
    half = dim // 2
    for s in range(len(lengths)):
        for row in range(starts[s], starts[s + 1]):
            position, index = positions[row], lengths[s] - starts[s + 1] + row
            page, slot = page_table[s, index // size], index % size
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
    window: int,
    out: Floats,
) -> None:
    """Compute causal ``softmax(q·k·scale)·v`` with an online softmax over pages.

    The query rows of a KV head (new tokens times `group` query heads) are processed in blocks of
    LANES rows. Lane r computes row ``block + r``.

    Args:
        q: fp32 `[n, heads, dim]`.
        out: fp32 `[n, heads, dim]`, written.
    """
    kv_heads, size, dim = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
    group = q.shape[1] // kv_heads
    queries = np.empty((dim, LANES), np.float32)  # queries times `scale`
    acc = np.empty((dim, LANES), np.float32)
    weights = np.empty((size, LANES), np.float32)  # scores, then exp(score - m)
    keys, values = np.empty((size, dim), np.float32), np.empty((size, dim), np.float32)
    m, rescale = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    l = np.empty(LANES, np.float32)  # noqa: E741 - as in the papers
    position = np.empty(LANES, np.int32)
    for s in range(len(lengths)):
        rows = (starts[s + 1] - starts[s]) * group
        before = lengths[s] - (starts[s + 1] - starts[s])  # number of tokens before the new ones
        for h in range(kv_heads):
            for block in range(0, rows, LANES):
                for r in range(LANES):
                    row = min(block + r, rows - 1)  # unused lanes repeat the last row
                    token, head = starts[s] + row // group, h * group + row % group
                    position[r] = before + row // group
                    m[r], l[r] = _LEAST, _f(0.0)
                    for d in range(dim):
                        queries[d, r] = q[token, head, d] * scale
                        acc[d, r] = _f(0.0)
                end = position[LANES - 1] + 1  # keys that the last row of the block attends to
                begin = max(0, position[0] + 1 - window)
                for p in range(begin // size, (end + size - 1) // size):
                    page, first = page_table[s, p], p * size
                    count = min(size, end - first)
                    # Scores of the page's keys: weights[j, r] = keys[j] · queries[:, r]
                    for j in range(count):
                        for d in range(dim):
                            keys[j, d] = as_float(_u(k_pages[page, h, j, d]) << _u(16))
                        for d in range(dim):
                            values[j, d] = as_float(_u(v_pages[page, h, j, d]) << _u(16))
                        for r in range(LANES):
                            weights[j, r] = _f(0.0)
                    accumulate(weights[:count], keys, 0, queries, 0, dim)
                    # Causal mask and running maximum.
                    for r in range(LANES):
                        rescale[r] = m[r]
                    for j in range(count):
                        for r in range(LANES):
                            visible = position[r] - window < first + j <= position[r]
                            x = weights[j, r] if visible else _f(-np.inf)
                            weights[j, r] = x
                            m[r] = x if x > m[r] else m[r]
                    # Weights, and their sum.
                    for r in range(LANES):
                        rescale[r] = exp(rescale[r] - m[r])
                        l[r] *= rescale[r]
                    for j in range(count):
                        for r in range(LANES):
                            x = exp(weights[j, r] - m[r])
                            weights[j, r] = x
                            l[r] += x
                    # acc[d, r] = acc[d, r] * rescale[r] + sum over j: values[j, d] * weights[j, r]
                    for d in range(dim):
                        for r in range(LANES):
                            acc[d, r] *= rescale[r]
                    accumulate(acc, values.T, 0, weights, 0, count)
                for r in range(min(LANES, rows - block)):
                    row = block + r
                    token, head = starts[s] + row // group, h * group + row % group
                    for d in range(dim):
                        out[token, head, d] = acc[d, r] / l[r]


@compiled
def attend_one(
    q: Floats,
    k_pages: Halves,
    v_pages: Halves,
    page_table: Ints,
    lengths: Ints,
    scale: np.float32,
    window: int,
    out: Floats,
) -> None:
    """Compute `attend` for one token of each sequence, with bitwise identical results.

    A lane holds one key while scores are computed, and one dimension while values are accumulated.
    The keys of a sequence are processed in blocks of LANES keys. The online softmax advances page
    by page.

    Args:
        k_pages, v_pages: pages of a size that divides LANES.
        q, out: fp32 `[s, heads, dim]`; ``out`` is written.
    """
    kv_heads, size, dim = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
    group = q.shape[1] // kv_heads
    strips = (dim + LANES - 1) // LANES  # dimensions are split into strips of LANES
    queries = np.empty((group, dim), np.float32)  # queries times `scale`
    keys = np.empty((dim, LANES), np.float32)
    values = np.zeros((strips, size, LANES), np.float32)
    scores = np.empty((group, LANES), np.float32)  # scores, then exp(score - m)
    acc = np.empty((strips, group, LANES), np.float32)
    m, l = np.empty(group, np.float32), np.empty(group, np.float32)  # noqa: E741 - see `attend`
    for s in range(len(lengths)):
        begin = max(0, lengths[s] - window)  # first key that is attended to
        for h in range(kv_heads):
            for g in range(group):
                m[g], l[g] = _LEAST, _f(0.0)
                for d in range(dim):
                    queries[g, d] = q[s, h * group + g, d] * scale
            acc[:] = _f(0.0)
            for start in range(begin // size * size, lengths[s], LANES):
                end = min(start + LANES, lengths[s])
                # Find the next block, which may belong to the next head or sequence. Its pages are
                # prefetched in software, because they are not contiguous.
                next_s, next_h, next_start = s, h, end
                if end == lengths[s]:
                    next_s, next_h = s + (h + 1) // kv_heads, (h + 1) % kv_heads
                    next_start = 0
                    if next_s < len(lengths):
                        next_start = max(0, lengths[next_s] - window) // size * size
                next_length = lengths[next_s] if next_s < len(lengths) else 0
                # scores[g, j] = queries[g] · keys[:, j]
                for first in range(start, end, size):
                    transpose(k_pages[page_table[s, first // size], h], keys, first - start)
                scores[:] = _f(0.0)
                accumulate(scores, queries, 0, keys, 0, dim)
                for first in range(start, end, size):
                    count, at = min(size, end - first), first - start
                    if next_start + at < next_length:
                        next_page = page_table[next_s, (next_start + at) // size]
                        prefetch(k_pages, next_page, next_h)
                        prefetch(v_pages, next_page, next_h)
                    page = v_pages[page_table[s, first // size], h]  # [slot, dim]
                    for j in range(count):
                        for strip in range(strips):
                            for d in range(min(LANES, dim - strip * LANES)):
                                bits = _u(page[j, strip * LANES + d]) << _u(16)
                                values[strip, j, d] = as_float(bits)
                    # Running maximum, weights and their sum, for the keys of this page.
                    hidden = max(at, begin - start)  # end of the keys before the window
                    for g in range(group):
                        new_m = m[g]
                        for j in range(at, hidden):
                            scores[g, j] = _f(-np.inf)
                        for j in range(at, at + count):
                            new_m = scores[g, j] if scores[g, j] > new_m else new_m
                        for j in range(at, at + count):
                            scores[g, j] = exp(scores[g, j] - new_m)
                        rescale = exp(m[g] - new_m)
                        new_l = l[g] * rescale
                        for j in range(at, at + count):
                            new_l += scores[g, j]
                        m[g], l[g] = new_m, new_l
                        for strip in range(strips):
                            for d in range(LANES):
                                acc[strip, g, d] *= rescale
                    # acc[strip, g] += sum over j: scores[g, at + j] * values[strip, j]
                    for strip in range(strips):
                        accumulate(acc[strip], scores, at, values[strip], 0, count)
            for g in range(group):
                for d in range(dim):
                    out[s, h * group + g, d] = acc[d // LANES, g, d % LANES] / l[g]
