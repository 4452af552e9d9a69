# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of random draws; `runtime.sampling.reference` specifies their results."""

import triton
import triton.language as tl

from runtime.sampling.reference import FORBIDDEN, ROUNDING

_KEPT = tl.constexpr(1.0 - ROUNDING)
_FORBIDDEN = tl.constexpr(FORBIDDEN)


@triton.jit
def mask_kernel(
    logits, stride, masks, masks_stride, index, masked, width, first, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy a block of a row per program, with `FORBIDDEN` where the token's bit is 0.

    Grid `(m, cdiv(width, BLOCK))`.

    Args:
        logits: fp32 `[m, width]`, row stride ``stride``.
        masks: int32 `[n, words]`, row stride ``masks_stride``; 32 tokens in each word.
        index: int32 `[m]`, the mask of each row; -1 if all tokens are allowed.
        masked: fp32 `[m, width]`, contiguous, written.
        first: bit of the first column.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = i < width
    bit = first + i
    at = tl.load(index + row).to(tl.int64)
    words = tl.load(masks + at * masks_stride + bit // 32, mask=valid & (at >= 0), other=-1)
    values = tl.load(logits + row * stride + i, mask=valid, other=0.0)
    allowed = ((words >> (bit % 32)) & 1) != 0
    tl.store(masked + row * width + i, tl.where(allowed, values, _FORBIDDEN), mask=valid)


@triton.jit
def partial_sums_kernel(
    logits, stride, largest, largest_stride, temperature, partials, width,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum ``exp((logit - largest) / temperature)`` over a part of a row per program, in fp64.

    Grid `(m, SPLITS)`.

    Args:
        logits: fp32 `[m, width]`, row stride ``stride``.
        largest: fp32 `[m]`, the largest logit of each row, stride ``largest_stride``.
        temperature: fp64 `[m]`.
        partials: fp64 `[m, SPLITS]`, written.
    """
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    most = tl.load(largest + row.to(tl.int64) * largest_stride)
    divisor = tl.load(temperature + row)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, width, SPLITS * BLOCK):
        mask = start + i < width
        values = tl.load(
            logits + row.to(tl.int64) * stride + start + i, mask=mask, other=float("-inf")
        )
        total += tl.exp((values - most).to(tl.float64) / divisor)
    tl.store(partials + row * SPLITS + tl.program_id(1), tl.sum(total, axis=0))


@triton.jit
def _mix(word):
    """Return one step of SplitMix64 of an int64; products wrap around."""
    word += -7046029254386353131  # 0x9E3779B97F4A7C15
    word = (word ^ _shifted(word, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    word = (word ^ _shifted(word, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return word ^ _shifted(word, 31)


@triton.jit
def _shifted(word, COUNT: tl.constexpr):
    """Shift int64 right logically, without sign extension."""
    return (word >> COUNT) & ((1 << (64 - COUNT)) - 1)


@triton.jit
def _uniform(words, stride):
    """Return `reference.uniform` of three words that are ``stride`` apart, fp64 `[1]`."""
    at = words + tl.arange(0, 1)
    state = _mix(tl.load(at))
    state = _mix(state ^ tl.load(at + stride))
    state = _mix(state ^ tl.load(at + 2 * stride))
    return _shifted(state, 11).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _token_by_id(tokens, equal, place, vocab):
    """Return the token that follows ``place`` smaller ones, of those where ``equal`` is true."""
    low, high = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + vocab - 1
    while low < high:
        middle = (low + high) // 2
        if tl.sum((equal & (tokens <= middle)).to(tl.int32), axis=0) > place:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def draw_kernel(
    values, tokens, log_sums, best, words, reals, rows, sampled, vocab, count, WIDTH: tl.constexpr
):  # fmt: skip
    """Draw the token of one row per program, from its most probable tokens, as `reference.draw`.

    Grid `(m,)`. Rows whose flag is greedy get the token in ``best``. If the candidates do not
    suffice, the token is invalid and the row's output index does not advance.

    Args:
        values, tokens, log_sums: `reference.Candidates`, contiguous, with ``count`` columns.
        best: int64 `[m]`.
        words: int64 `[6, rows]`: greedy, top-k, min-tokens, seed, choice, and the output index,
            which is written.
        reals: fp64 `[3, rows]`: temperature, min-p, top-p.
        sampled: int64 `[m, 3]`; token and whether it is valid are written, in columns 0 and 2.
        WIDTH: smallest power of two that is at least ``count``.
    """
    row = tl.program_id(0)
    rank = tl.arange(0, WIDTH)
    valid = rank < count
    own = row.to(tl.int64) * count + rank
    logits = tl.load(values + own, mask=valid, other=float("-inf"))  # [WIDTH], descending
    first = tl.load(values + row.to(tl.int64) * count)
    top_k = tl.load(words + rows + row)
    temperature, min_p = tl.load(reals + row), tl.load(reals + rows + row)
    top_p = tl.load(reals + 2 * rows + row)
    truncated = (min_p > 0) | (top_k < vocab)
    everything = count == vocab

    mass = tl.exp((logits - first).to(tl.float64) / temperature - tl.load(log_sums + row))
    mass = tl.where(valid, mass, 0.0)
    most = tl.sum(tl.where(rank == 0, mass, 0.0), axis=0)
    kept = (mass >= most * min_p) & (rank < top_k) & valid
    kept_mass = tl.where(kept, mass, 0.0)
    running = tl.cumsum(kept_mass, axis=0)
    total = tl.where(truncated, tl.sum(kept_mass, axis=0), 1.0)
    bound = tl.where(top_p == 1.0, float("inf"), top_p * total * _KEPT)
    nucleus = (kept & (running - mass < bound)) | (rank == 0)

    last = rank == count - 1
    whole_nucleus = tl.sum((nucleus & last).to(tl.int32), axis=0) > 0
    whole_kept = tl.sum((kept & last).to(tl.int32), axis=0) > 0
    ended = ((whole_nucleus == 0) & ((whole_kept == 0) | (truncated == 0))) | everything
    total = tl.where(ended, tl.sum(tl.where(nucleus, mass, 0.0), axis=0), 1.0)
    limit = _uniform(words + 3 * rows + row, rows) * total  # [1]
    size = tl.sum(nucleus.to(tl.int32), axis=0)
    passed = tl.sum(((running <= limit) & nucleus).to(tl.int32), axis=0)
    pick = tl.minimum(passed, size - 1)

    picked = tl.sum(tl.where(rank == pick, logits, 0.0), axis=0)
    equal = (logits == picked) & valid
    ids = tl.load(tokens + own, mask=valid, other=0)
    token = tl.sum(tl.where(rank == pick, ids, 0), axis=0)
    if tl.sum(equal.to(tl.int32), axis=0) > 1:
        place = pick - tl.sum((logits > picked).to(tl.int32), axis=0)
        token = _token_by_id(ids, equal, place, vocab).to(tl.int64)
    least = tl.sum(tl.where(last, logits, 0.0), axis=0)
    resolved = ended | ((truncated == 0) & (top_p == 1.0) & (passed < size))
    resolved = resolved & ((picked > least) | everything)

    greedy = tl.load(words + row) > 0
    resolved = (resolved | greedy).to(tl.int64)
    tl.store(sampled + row * 3, tl.where(greedy, tl.load(best + row), token))
    tl.store(sampled + row * 3 + 2, resolved)
    index = words + 5 * rows + row
    tl.store(index, tl.load(index) + resolved)
