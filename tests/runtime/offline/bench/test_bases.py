"""Sizes of weights whose layers share bases, by hand for a tiny shape."""

import pytest

from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.weights import FactorPair
from runtime.offline.bench.bases import part_of, sizes
from runtime.offline.bench.shapes import SHAPES, random_checkpoint

RANKS = {"q": 21, "k": 16, "v": 16, "o": 16, "gate": 24, "up": 24, "down": 19}
ROW = 2 * 64


@pytest.mark.parametrize(
    ("ranks", "rows"), [(1, 24 + 16 + 16 + 24 + 24), (2, 32 + 24)], ids=["T=1", "T=2"]
)
def test_each_shared_basis_counts_once_in_memory_and_for_each_layer_in_a_step(
    ranks: int, rows: int
) -> None:
    whole = random_checkpoint(SHAPES["tiny"], 0.5, device="cpu", on_demand=True, group=2)
    in_memory, copied, step = sizes(part_of(whole, ranks))
    assert copied - in_memory == rows * ROW
    alone = random_checkpoint(SHAPES["tiny"], 0.5, device="cpu", on_demand=True)
    assert len(set(sizes(part_of(alone, ranks))[:2])) == 1
    assert step < copied


def test_random_checkpoint_shares_bases() -> None:
    made, lazy = (
        random_checkpoint(SHAPES["tiny"], 0.5, device="cpu", on_demand=on_demand, group=2)
        for on_demand in (False, True)
    )
    assert basis_groups(made) == basis_groups(lazy)
    assert len(basis_groups(made)) == 5
    for layer in (*made.layers, *lazy.layers):
        pairs = {name: getattr(layer, name) for name in RANKS}
        assert all(isinstance(pair, FactorPair) for pair in pairs.values())
        assert {name: pair.rank for name, pair in pairs.items()} == RANKS
