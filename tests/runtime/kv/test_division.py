# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Division of tiles over programs by cost, compared with a search over all tiles."""

import random
from itertools import accumulate, pairwise

import pytest
import torch
import triton
import triton.language as tl

from runtime.attention.kernels.balance import interval_begin
from runtime.kv.kernels.division import divide_costs, splits_by_cost, tile_at
from tests.runtime.device import DEVICE

pytestmark = [pytest.mark.triton, pytest.mark.long]

LEAST = 20


@triton.jit
def _kernel(
    counts, costs, begins, used, heads,
    PROGRAMS: tl.constexpr, MIN_COST: tl.constexpr, KV_HEADS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Write the first tile of each program, the number of programs, and the splits of each head."""
    s = tl.arange(0, SEQUENCES)
    tiles = tl.load(counts + s)
    cost_ends, programs, each, extra = divide_costs(tiles, costs, PROGRAMS, MIN_COST, KV_HEADS)
    program = tl.program_id(0)
    cost = interval_begin(tl.minimum(program, programs), each, extra)
    tl.store(begins + program, tile_at(cost, tiles, costs, KV_HEADS))
    tl.store(used, programs)
    for sequence in range(SEQUENCES):
        count = tl.load(counts + sequence)
        if count > 0:
            for head in range(KV_HEADS):
                first, splits, slot = splits_by_cost(
                    sequence, head, count, cost_ends, costs, each, extra, KV_HEADS
                )
                at = heads + (sequence * KV_HEADS + head) * 3
                tl.store(at, first)
                tl.store(at + 1, splits)
                tl.store(at + 2, slot)


@pytest.mark.parametrize("seed", range(12))
def test_programs_have_all_tiles_and_equal_costs(seed: int) -> None:
    chosen = random.Random(seed)
    kv_heads = chosen.choice([1, 2, 3, 8])
    sequences = 4
    grid = chosen.choice([2, 7, 40])
    costs = [chosen.randint(1, LEAST // 2) for _ in range(kv_heads)]
    limit = chosen.choice([2, 50])
    counts = [chosen.choice([0, chosen.randint(0, limit)]) for _ in range(sequences)]

    of_tiles, owner = [], []  # cost, and sequence and head, of each tile
    for sequence in range(sequences):
        for head in range(kv_heads):
            of_tiles += [costs[head]] * counts[sequence]
            owner += [(sequence, head)] * counts[sequence]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    begins, used, heads = ints([0] * (grid + 1)), ints([0]), ints([0] * (sequences * kv_heads * 3))
    _kernel[(grid + 1,)](
        ints(counts), ints([0, *accumulate(costs)]), begins, used, heads,
        PROGRAMS=grid, MIN_COST=LEAST, KV_HEADS=kv_heads, SEQUENCES=sequences,
    )  # fmt: skip
    programs = int(used)
    assert programs <= grid
    found = begins.tolist()[: programs + 1]
    # The grid of the test has one more program, whose first tile is the end of the last one.
    assert (found[0], found[-1]) == (0, len(of_tiles))
    for begin, end in pairwise(found):
        assert end > begin
        assert abs(sum(of_tiles[begin:end]) - sum(of_tiles) / programs) <= max(of_tiles)

    holders = [p for p, (a, b) in enumerate(pairwise(found)) for _ in range(b - a)]
    for number, (first, count, slot) in enumerate(heads.view(-1, 3).tolist()):
        if tiles := [t for t, at in enumerate(owner) if at == divmod(number, kv_heads)]:
            assert (first, first + count - 1) == (holders[tiles[0]], holders[tiles[-1]])
            assert slot == (tiles[0] > found[first])
