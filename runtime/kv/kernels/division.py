# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Division of tiles of stored and exact tokens over programs, by cost or by a fixed number.

Tiles are numbered as in `runtime.attention.kernels.balance`; the stored tiles of a KV head come
before its exact ones. With **costs**, a program has the tiles that begin in its interval of the
cost of the whole batch. Programs are then balanced up to one tile, also if KV heads have different
ranks. ``costs``, int32 `[KV_HEADS + 1]`, are the sums of the costs of a stored tile over the KV
heads before each one; each exact tile costs EXACT_COST.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.balance import interval_begin, program_of
from runtime.kernels.arith import power_of_2


@triton.jit
def divide_costs(
    stored, exact, costs,
    EXACT_COST: tl.constexpr, MIN_COST: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Divide the cost of a batch into intervals; see `balance.divide`.

    Args:
        stored, exact: int32 `[SEQUENCES]`, stored and exact tiles of one KV head of each sequence.
        MIN_COST: minimum cost of an interval, at least twice that of any tile: every interval then
            has a tile.

    Returns:
        The cost of all sequences up to each one, `[SEQUENCES]`; the number of programs with an
        interval; and ``each`` and ``extra``, see `balance.interval_begin`.
    """
    own = stored * tl.load(costs + KV_HEADS) + exact * (EXACT_COST * KV_HEADS)
    total = tl.sum(own, axis=0)
    programs = tl.minimum(tl.num_programs(0), tl.cdiv(total, MIN_COST))
    return tl.cumsum(own, axis=0), programs, total // programs, total % programs


@triton.jit
def tile_at(
    cost, stored, exact, ends, cost_ends, costs, EXACT_COST: tl.constexpr, KV_HEADS: tl.constexpr
):  # fmt: skip
    """Return the first tile that begins at or after a cost.

    Args:
        stored, exact: see `divide_costs`.
        ends, cost_ends: tile and cost after each sequence, `[SEQUENCES]`.
    """
    s = tl.arange(0, ends.shape[0])
    sequence = tl.sum((cost_ends <= cost).to(tl.int32), axis=0)
    before = tl.max(tl.where(s < sequence, ends, 0), axis=0)
    cost -= tl.max(tl.where(s < sequence, cost_ends, 0), axis=0)
    # After the last sequence, both are 0.
    own_stored = tl.sum(tl.where(s == sequence, stored, 0), axis=0)
    own_exact = tl.sum(tl.where(s == sequence, exact, 0), axis=0)

    h = tl.arange(0, power_of_2(KV_HEADS))
    after = tl.load(costs + h + 1, mask=h < KV_HEADS, other=0)
    head_ends = own_stored * after + own_exact * EXACT_COST * (h + 1)
    head = tl.sum(((h < KV_HEADS - 1) & (head_ends <= cost)).to(tl.int32), axis=0)
    passed = tl.load(costs + head)
    of_stored = tl.load(costs + head + 1) - passed
    cost -= own_stored * passed + own_exact * EXACT_COST * head
    beyond = cost - own_stored * of_stored
    index = tl.where(
        beyond <= 0, tl.cdiv(cost, of_stored), own_stored + tl.cdiv(beyond, EXACT_COST)
    )
    return before + head * (own_stored + own_exact) + index


@triton.jit
def parts_by_cost(
    sequence, kv_head, stored, count, cost_ends, costs, each, extra,
    EXACT_COST: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Return the parts of a KV head, as `balance.head_parts` does.

    Args:
        stored, count: stored tiles and all tiles of the head, of which the last one is exact.
    """
    s = tl.arange(0, cost_ends.shape[0])
    passed = tl.load(costs + kv_head)
    exact = (count - stored) * EXACT_COST
    begin = tl.max(tl.where(s < sequence, cost_ends, 0), axis=0) + stored * passed + exact * kv_head
    last = begin + stored * (tl.load(costs + kv_head + 1) - passed) + exact - EXACT_COST
    first = program_of(begin, each, extra)
    # The tile before the head, if any, is an exact one.
    follows = begin - EXACT_COST >= interval_begin(first, each, extra)
    return first, program_of(last, each, extra) - first + 1, follows.to(tl.int32)


@triton.jit
def split_interval(
    program, sequences, tiles, ends, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr
):  # fmt: skip
    """Return the interval of a program if SPLITS programs share each KV head; it may be empty."""
    s = tl.arange(0, tiles.shape[0])
    sequence = program // (SPLITS * KV_HEADS)
    count = tl.sum(tl.where(s == sequence, tiles, 0), axis=0)  # 0 after the last sequence
    before = tl.sum(tl.where(s == sequence, ends, 0), axis=0) - count * KV_HEADS
    head_begin = before + program // SPLITS % KV_HEADS * count
    chunk = tl.cdiv(count, SPLITS)
    begin = tl.minimum(program % SPLITS * chunk, count)
    return head_begin + begin, head_begin + tl.minimum(begin + chunk, count)


@triton.jit
def split_parts(sequence, kv_head, count, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr):
    """Return the parts of a KV head with ``count`` tiles, as `balance.head_parts` does."""
    first = (sequence * KV_HEADS + kv_head) * SPLITS
    return first, tl.cdiv(count, tl.cdiv(count, SPLITS)), 0
