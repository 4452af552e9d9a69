"""Parts of a model that the ranks of a worker hold."""

from dataclasses import replace
from itertools import chain

import pytest

from runtime.parallel.partition import LowRankRows, Partition, Scheme
from tests.runtime.tiny import CONFIG

SMOLLM2 = replace(
    CONFIG, num_heads=9, num_kv_heads=3, intermediate_size=1536, vocab_size=49152, head_dim=64
)


def parts(size: int, scheme: Scheme = Scheme.LOW_RANK) -> list[Partition]:
    return [Partition.of(SMOLLM2, rank, size, scheme) for rank in range(size)]


@pytest.mark.parametrize("size", range(1, 10))
def test_ranks_divide_query_heads_features_and_vocabulary(size: int) -> None:
    found = parts(size)
    for name, count in (("heads", 9), ("features", 1536), ("tokens", 49152)):
        assert list(chain.from_iterable(getattr(part, name) for part in found)) == [*range(count)]


@pytest.mark.parametrize("size", range(1, 10))
def test_each_rank_has_the_kv_heads_of_its_query_heads(size: int) -> None:
    for part in parts(size):
        assert sorted({head // 3 for head in part.heads}) == [*part.kv_heads]
        config = part.config_of(SMOLLM2)
        assert config.num_heads % config.num_kv_heads == 0
        assert config.first_kv_head == part.kv_heads.start


def test_kv_heads_are_uneven_or_on_several_ranks() -> None:
    assert [[*part.kv_heads] for part in parts(2)] == [[0], [1, 2]]
    assert [[*part.kv_heads] for part in parts(4)] == [[0], [0], [1], [2]]
    assert [len(part.heads) for part in parts(4)] == [1, 2, 3, 3]


def test_features_are_divided_in_units_of_tiles() -> None:
    assert [part.features for part in parts(5)][:2] == [range(256), range(256, 576)]


def test_base_scheme_has_all_heads_on_every_rank() -> None:
    for part in parts(2, Scheme.BASE):
        config = part.config_of(SMOLLM2)
        assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (9, 3, 1536)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("num_heads", 3, "4 ranks, but the model has only 3 query heads"),
        ("intermediate_size", 2, "only 2 features of the MLP"),
        ("vocab_size", 3, "only 3 vocabulary rows"),
    ],
)
def test_more_ranks_than_parts_are_refused(field: str, value: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Partition.of(replace(SMOLLM2, **{field: value}), 0, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("ranks", [(12, 5, 9), (1,), (64, 8), (40, 3, 3, 70)])
def test_gathered_rows_are_the_stacked_bases(ranks: tuple[int, ...], size: int) -> None:
    """Build the stack of every rank from row numbers, and look for each row at its offset."""
    gathered: list[tuple[int, int] | None] = []
    for rank in range(size):
        low = LowRankRows.of(ranks, rank, size)
        stack: list[tuple[int, int] | None] = [None] * low.height
        for pair, (rows, place) in enumerate(zip(low.rows, low.places, strict=True)):
            stack[place : place + len(rows)] = [(pair, row) for row in rows]
        assert len(stack) == low.height
        gathered += stack
    for pair, (count, offset) in enumerate(zip(ranks, low.offsets, strict=True)):
        assert offset % 8 == 0
        assert gathered[offset : offset + count] == [(pair, row) for row in range(count)]
