"""Compiled CPU loops of encoders. `attention.py` and `pooling.py` prepare their arguments.

As in `runtime.cpu.jit`, operations are executed in the order written, and every row is computed
from its own input alone. Results are therefore bitwise identical in any batch.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.cpu.jit import Floats, compiled, exp
from runtime.cpu.tiles import LANES, NARROW, accumulate_cached, accumulate_narrow

KEYS = 64
"""Number of keys whose scores are computed at once."""
Ints = NDArray[np.int32]
_f = np.float32
_LEAST = _f(np.finfo(np.float32).min)


@compiled
def _maxima(scores: Floats, width: int, m: Floats) -> None:
    """Raise ``m`` to the maxima of the first ``width`` columns of ``scores`` `[n, LANES]`."""
    whole = len(scores) // 4 * 4
    for j in range(0, whole, 4):  # four rows for each read of m
        for r in range(width):
            a, b, c, d = scores[j, r], scores[j + 1, r], scores[j + 2, r], scores[j + 3, r]
            a = a if a > b else b
            c = c if c > d else d
            a = a if a > c else c
            m[r] = a if a > m[r] else m[r]
    for j in range(whole, len(scores)):
        for r in range(width):
            m[r] = scores[j, r] if scores[j, r] > m[r] else m[r]


@compiled
def _add_product(c: Floats, a: Floats, b: Floats, width: int) -> None:
    """Add ``a @ b`` to the first ``width`` columns of ``c`` `[m, LANES]`, in order of k."""
    if width == LANES:
        accumulate_cached(c, a, 0, b, 0, a.shape[1])
    else:
        for strip in range(0, width, NARROW):
            columns = slice(strip, strip + NARROW)
            accumulate_narrow(c[:, columns], a, 0, b[:, columns], 0, a.shape[1])


@compiled
def attend(q: Floats, k: Floats, v: Floats, starts: Ints, scale: np.float32, out: Floats) -> None:
    """Compute ``softmax(q·k·scale)·v`` over all tokens of each input, with an online softmax.

    The tokens of a head are processed in blocks of LANES; lane r computes token ``block + r``. The
    last block of an input has only as many lanes as it needs, a multiple of NARROW. For ``m``,
    ``l`` and ``acc``, see `runtime.attention.loops`.

    Args:
        q, k, v: fp32 `[n, heads, dim]`, with any strides.
        starts: int32 `[s + 1]`, see `RaggedBatch`.
        out: fp32 `[n, heads, dim]`, written.
    """
    heads, dim = q.shape[1], q.shape[2]
    longest = 0
    for s in range(len(starts) - 1):
        longest = max(longest, starts[s + 1] - starts[s])
    # Keys and values of one head of one input, contiguous: rows of k and v are far apart.
    keys, values = np.empty((longest, dim), np.float32), np.empty((longest, dim), np.float32)
    queries = np.empty((dim, LANES), np.float32)  # queries times `scale`
    acc = np.empty((dim, LANES), np.float32)
    weights = np.empty((KEYS, LANES), np.float32)  # scores, then exp(score - m)
    m, rescale = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    l = np.empty(LANES, np.float32)  # noqa: E741 - as in the papers
    for s in range(len(starts) - 1):
        first, end = starts[s], starts[s + 1]
        for h in range(heads):
            for row in range(first, end):
                for d in range(dim):
                    keys[row - first, d] = k[row, h, d]
                    values[row - first, d] = v[row, h, d]
            for block in range(first, end, LANES):
                width = min(LANES, (end - block + NARROW - 1) // NARROW * NARROW)
                for r in range(width):
                    row = min(block + r, end - 1)  # unused lanes repeat the last token
                    m[r], l[r] = _LEAST, _f(0.0)
                    for d in range(dim):
                        queries[d, r] = q[row, h, d] * scale
                acc[:, :width] = _f(0.0)
                for at in range(0, end - first, KEYS):
                    count = min(KEYS, end - first - at)
                    weights[:count, :width] = _f(0.0)
                    _add_product(weights[:count], keys[at : at + count], queries, width)
                    for r in range(width):
                        rescale[r] = m[r]
                    _maxima(weights[:count], width, m)
                    for r in range(width):
                        rescale[r] = exp(rescale[r] - m[r])
                        l[r] *= rescale[r]
                    for j in range(count):
                        for r in range(width):
                            x = exp(weights[j, r] - m[r])
                            weights[j, r] = x
                            l[r] += x
                    if at > 0:
                        for d in range(dim):
                            for r in range(width):
                                acc[d, r] *= rescale[r]
                    _add_product(acc, values[at : at + count].T, weights, width)
                for r in range(min(LANES, end - block)):
                    for d in range(dim):
                        out[block + r, h, d] = acc[d, r] / l[r]


@compiled
def mean(hidden: Floats, starts: Ints, root: bool, out: Floats) -> None:
    """Write the mean of each input's tokens, or their sum over the root of their number.

    Args:
        hidden: fp32 `[n, d]`.
        starts: int32 `[s + 1]`, see `RaggedBatch`.
        root: whether sums are divided by the square root of the number of tokens.
        out: fp32 `[s, d]`, written.
    """
    width = hidden.shape[1]
    for s in range(len(starts) - 1):
        count = _f(starts[s + 1] - starts[s])
        divisor = np.sqrt(count) if root else count
        for d in range(width):
            out[s, d] = _f(0.0)
        for row in range(starts[s], starts[s + 1]):
            for d in range(width):
                out[s, d] += hidden[row, d]
        for d in range(width):
            out[s, d] /= divisor


@compiled
def normalize(x: Floats, least: np.float32) -> None:
    """Divide each row of ``x`` `[n, d]` by its norm, or by ``least`` if that is larger."""
    for row in range(x.shape[0]):
        square = np.float64(0.0)
        for d in range(x.shape[1]):
            square += np.float64(x[row, d]) * np.float64(x[row, d])
        norm = max(_f(np.sqrt(square)), least)
        for d in range(x.shape[1]):
            x[row, d] /= norm
