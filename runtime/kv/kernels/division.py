# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Division of compressed tiles over programs, by cost or by a fixed number.

Tiles are numbered as in `runtime.attention.kernels.balance`. With **costs**, the
total cost of the batch is divided into equal intervals, and a program has the tiles that begin in
its interval. Programs are then balanced up to one tile, also if KV heads have different ranks.
``costs``, int32 `[KV_HEADS + 1]`, are exclusive prefix sums over the KV heads of the cost of a tile
of each head.
"""

import triton
import triton.language as tl

from runtime.attention.kernels.balance import interval_begin, program_of
from runtime.kernels.arith import power_of_2


@triton.jit
def divide_costs(
    tiles, costs, PROGRAMS: tl.constexpr, MIN_COST: tl.constexpr, KV_HEADS: tl.constexpr
):  # fmt: skip
    """Divide the cost of a batch into intervals; see `balance.divide`.

    Args:
        tiles: int32 `[SEQUENCES]`, number of tiles of one KV head of each sequence.
        PROGRAMS: maximum number of intervals.
        MIN_COST: minimum cost of an interval, at least twice that of any tile: every interval then
            has a tile.

    Returns:
        The cost up to the end of each sequence, `[SEQUENCES]`; the number of programs with an
        interval; and ``each`` and ``extra``, see `balance.interval_begin`.
    """
    own = tiles * tl.load(costs + KV_HEADS)
    total = tl.sum(own, axis=0)
    programs = tl.minimum(PROGRAMS, tl.cdiv(total, MIN_COST))
    shared = tl.maximum(programs, 1)
    return tl.cumsum(own, axis=0), programs, total // shared, total % shared


@triton.jit
def tile_at(cost, tiles, costs, KV_HEADS: tl.constexpr):
    """Return the number of the first tile that begins at or after a cost.

    Args:
        cost: at most that of the whole batch. A tile begins at the cost of all tiles before it.
        tiles: see `divide_costs`.
    """
    s = tl.arange(0, tiles.shape[0])
    # `ends` counts tiles of one KV head. `own` is 0 after the last sequence.
    ends = tl.cumsum(tiles, axis=0)
    whole = tl.load(costs + KV_HEADS)
    sequence = tl.sum((ends * whole <= cost).to(tl.int32), axis=0)
    before = tl.max(tl.where(s < sequence, ends, 0), axis=0)
    cost -= before * whole
    own = tl.sum(tl.where(s == sequence, tiles, 0), axis=0)

    h = tl.arange(0, power_of_2(KV_HEADS))
    after = tl.load(costs + h + 1, mask=h < KV_HEADS, other=0)
    head = tl.sum(((h < KV_HEADS - 1) & (own * after <= cost)).to(tl.int32), axis=0)
    passed = tl.load(costs + head)
    of_tile = tl.load(costs + head + 1) - passed
    return before * KV_HEADS + head * own + tl.cdiv(cost - own * passed, of_tile)


@triton.jit
def splits_by_cost(
    sequence, kv_head, count, cost_ends, costs, each, extra, KV_HEADS: tl.constexpr
):  # fmt: skip
    """Return the splits of a KV head with ``count`` tiles, as `balance.head_splits` does."""
    s = tl.arange(0, cost_ends.shape[0])
    passed = tl.load(costs + kv_head)
    of_tile = tl.load(costs + kv_head + 1) - passed
    begin = tl.max(tl.where(s < sequence, cost_ends, 0), axis=0) + count * passed
    last = begin + (count - 1) * of_tile
    first = program_of(begin, each, extra)
    # The KV head before this one; the tile before `begin` is its last.
    previous = (kv_head + KV_HEADS - 1) % KV_HEADS
    of_previous = tl.load(costs + previous + 1) - tl.load(costs + previous)
    follows = begin - of_previous >= interval_begin(first, each, extra)
    return first, program_of(last, each, extra) - first + 1, follows.to(tl.int32)


@triton.jit
def split_interval(
    program, sequences, tiles, ends, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr
):  # fmt: skip
    """Return begin and end of a program's tiles if SPLITS programs share each KV head.

    The interval may be empty.
    """
    s = tl.arange(0, tiles.shape[0])
    sequence = program // (SPLITS * KV_HEADS)
    # Tiles of one KV head; 0 after the last sequence.
    count = tl.sum(tl.where(s == sequence, tiles, 0), axis=0)
    before = tl.sum(tl.where(s == sequence, ends, 0), axis=0) - count * KV_HEADS
    head_begin = before + program // SPLITS % KV_HEADS * count
    chunk = tl.cdiv(count, SPLITS)
    begin = tl.minimum(program % SPLITS * chunk, count)
    return head_begin + begin, head_begin + tl.minimum(begin + chunk, count)


@triton.jit
def fixed_splits(sequence, kv_head, count, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr):
    """Return the splits of a KV head with ``count`` tiles, as `balance.head_splits` does."""
    first = (sequence * KV_HEADS + kv_head) * SPLITS
    return first, tl.cdiv(count, tl.cdiv(count, SPLITS)), 0
