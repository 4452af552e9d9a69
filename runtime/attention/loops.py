"""Compiled loops of attention on the CPU. Loops only: `cpu.py` prepares their arguments.

Every result is defined by the order of IEEE operations as written (no fast-math; fused
multiply-adds are explicit), so that neither the batch, nor the chunks of a prompt, nor the width of
the lanes changes a bit of it. Each lane is one query head of one token; lanes never mix.

Arguments that recur:
    k_pages, v_pages: u16 `[page, kv_head, slot, dim]`, bf16 patterns.
    page_table: int32 `[s, p]`; starts: int32 `[s + 1]`; lengths: int32 `[s]`, see `base.Batch`.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.compiled import Floats, as_bits, as_float, compiled, exp, fma

Patterns = NDArray[np.uint16]
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
    k_pages: Patterns,
    v_pages: Patterns,
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


def attend_with(lanes: int) -> Callable[..., None]:
    """The attention loop with ``lanes`` query rows side by side; more suit more rows a sequence."""

    def attend(
        q: Floats,
        k_pages: Patterns,
        v_pages: Patterns,
        page_table: Ints,
        starts: Ints,
        lengths: Ints,
        scale: np.float32,
        out: Floats,
    ) -> None:
        """Causal softmax(q·k·scale)·v with an online softmax, a page at a time.

        Args:
            q: `[n, heads, dim]`, dim a multiple of 4.
            out: `[n, heads, dim]`, written.
        """
        kv_heads, size, dim = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
        group = q.shape[1] // kv_heads
        queries = np.empty((dim, lanes), np.float32)
        mixed = np.empty((dim, lanes), np.float32)
        weights = np.empty((size + 4, lanes), np.float32)
        keys, values = np.empty((size, dim), np.float32), np.empty((size + 4, dim), np.float32)
        peak, rescale = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
        total = np.empty(lanes, np.float32)
        position = np.empty(lanes, np.int32)
        for s in range(len(lengths)):
            rows = (starts[s + 1] - starts[s]) * group
            before = lengths[s] - (starts[s + 1] - starts[s])
            for h in range(kv_heads):
                for block in range(0, rows, lanes):
                    for r in range(lanes):
                        row = min(block + r, rows - 1)  # spare lanes repeat the last row
                        token, head = starts[s] + row // group, h * group + row % group
                        position[r] = before + row // group
                        peak[r], total[r] = _f(-np.inf), _f(0.0)
                        for d in range(dim):
                            queries[d, r] = q[token, head, d] * scale
                            mixed[d, r] = _f(0.0)
                    end = position[lanes - 1] + 1
                    for p in range((end + size - 1) // size):
                        page, first = page_table[s, p], p * size
                        count = min(size, end - first)
                        for j in range(count):
                            for d in range(dim):
                                keys[j, d] = as_float(_u(k_pages[page, h, j, d]) << _u(16))
                            for d in range(dim):
                                values[j, d] = as_float(_u(v_pages[page, h, j, d]) << _u(16))
                            for r in range(lanes):
                                weights[j, r] = _f(0.0)
                        for j in range(count, count + 4):  # the products below go by fours
                            for d in range(dim):
                                values[j, d] = _f(0.0)
                            for r in range(lanes):
                                weights[j, r] = _f(0.0)
                        for d in range(0, dim, 4):
                            for j in range(count):
                                k0, k1 = keys[j, d], keys[j, d + 1]
                                k2, k3 = keys[j, d + 2], keys[j, d + 3]
                                for r in range(lanes):
                                    x = fma(k0, queries[d, r], weights[j, r])
                                    x = fma(k1, queries[d + 1, r], x)
                                    x = fma(k2, queries[d + 2, r], x)
                                    weights[j, r] = fma(k3, queries[d + 3, r], x)
                        for r in range(lanes):
                            rescale[r] = peak[r]
                        for j in range(count):
                            for r in range(lanes):
                                seen = first + j <= position[r]
                                x = weights[j, r] if seen else _f(-np.inf)
                                weights[j, r] = x
                                peak[r] = x if x > peak[r] else peak[r]
                        for r in range(lanes):
                            rescale[r] = exp(rescale[r] - peak[r])
                            total[r] *= rescale[r]
                        for j in range(count):
                            for r in range(lanes):
                                x = exp(weights[j, r] - peak[r])
                                weights[j, r] = x
                                total[r] += x
                        for d in range(dim):
                            for r in range(lanes):
                                mixed[d, r] *= rescale[r]
                        for j in range(0, count, 4):
                            for d in range(dim):
                                v0, v1 = values[j, d], values[j + 1, d]
                                v2, v3 = values[j + 2, d], values[j + 3, d]
                                for r in range(lanes):
                                    x = fma(v0, weights[j, r], mixed[d, r])
                                    x = fma(v1, weights[j + 1, r], x)
                                    x = fma(v2, weights[j + 2, r], x)
                                    mixed[d, r] = fma(v3, weights[j + 3, r], x)
                    for r in range(min(lanes, rows - block)):
                        row = block + r
                        token, head = starts[s] + row // group, h * group + row % group
                        for d in range(dim):
                            out[token, head, d] = mixed[d, r] / total[r]

    return compiled(attend)
