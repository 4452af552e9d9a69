"""KV heads are cut where a range of either worker ends, and each reader gets each head once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.parallel.partition import MAX_RANKS, Partition
from services.transfer.routes import Route, routes_between
from tests.runtime.tiny import CONFIG


def split(heads: int, ranks: int) -> list[range]:
    """Return equal ranges of heads."""
    each = heads // ranks
    return [range(rank * each, (rank + 1) * each) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("senders", "readers", "expected"),
    [
        (1, 1, [(0, 0, 0, 8)]),
        (2, 1, [(0, 0, 0, 4), (1, 0, 4, 8)]),
        (1, 2, [(0, 0, 0, 4), (0, 1, 4, 8)]),
        (2, 2, [(0, 0, 0, 4), (1, 1, 4, 8)]),
        (4, 2, [(0, 0, 0, 2), (1, 0, 2, 4), (2, 1, 4, 6), (3, 1, 6, 8)]),
    ],
)
def test_routes_of_equal_ranks(
    senders: int, readers: int, expected: list[tuple[int, int, int, int]]
) -> None:
    found = routes_between(split(8, senders), split(8, readers))
    is_split = senders != readers
    assert found == tuple(Route(s, r, range(first, end), is_split) for s, r, first, end in expected)


def test_heads_that_several_ranks_have_are_sent_once_to_each_reader() -> None:
    copies = [range(1), range(1), range(1, 2), range(1, 2)]
    assert routes_between(copies, [range(2)]) == (
        Route(0, 0, range(1), split=True),
        Route(2, 0, range(1, 2), split=True),
    )
    assert [(route.sender, route.reader) for route in routes_between([range(2)], copies)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
    ]


def test_readers_of_a_head_are_divided_among_the_senders_that_have_it() -> None:
    def copies(each: int) -> list[range]:
        return [range(head, head + 1) for head in range(2) for _ in range(each)]

    def found(senders: int, readers: int) -> list[int]:
        return [route.sender for route in routes_between(copies(senders), copies(readers))]

    assert found(2, 2) == [0, 1, 2, 3]
    assert found(2, 1) == [0, 2]
    assert found(1, 2) == [0, 0, 1, 1]
    assert found(2, 3) == [0, 0, 1, 2, 2, 3]


@given(kv_heads=st.integers(1, 9), senders=st.integers(1, 18), readers=st.integers(1, 18))
def test_workers_of_any_numbers_of_ranks_have_routes(
    kv_heads: int, senders: int, readers: int
) -> None:
    config = replace(CONFIG, num_heads=18 * kv_heads, num_kv_heads=kv_heads)

    def heads(size: int) -> list[range]:
        return [Partition.of(config, rank, size).kv_heads for rank in range(size)]

    routes = routes_between(heads(senders), heads(readers))
    for rank, wanted in enumerate(heads(readers)):
        got = [head for route in routes if route.reader == rank for head in route.kv_heads]
        assert got == list(wanted)
    if senders == readers:
        assert [(route.sender, route.reader) for route in routes] == [
            (rank, rank) for rank in range(senders)
        ]
        assert not any(route.split for route in routes)


ranks = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(sizes=ranks, cuts=st.sets(st.integers(1, 29)))
def test_every_reader_gets_each_of_its_heads_once(sizes: list[int], cuts: set[int]) -> None:
    total = sum(sizes)
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    senders = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    edges = [0, *sorted(cut for cut in cuts if cut < total), total]
    readers = [range(*edges[at : at + 2]) for at in range(len(edges) - 1)]
    routes = routes_between(senders, readers)
    for rank, heads in enumerate(readers):
        got = [head for route in routes if route.reader == rank for head in route.kv_heads]
        assert got == list(heads)
        own = [route for route in routes if route.reader == rank]
        assert len(own) == 1 or all(route.split for route in own)
    assert all(set(route.kv_heads) <= set(senders[route.sender]) for route in routes)


def test_ranks_with_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="only the decode worker has head 8"):
        routes_between(split(8, 2), split(9, 1))
    with pytest.raises(ValueError, match="only the decode worker has head 4294967295"):
        routes_between(split(8, 2), [range(8), range((1 << 32) - 1, (1 << 33) - 2)])
    with pytest.raises(ValueError, match="only the prefill worker has head 7"):
        routes_between(split(8, 2), split(7, 1))


def test_routes_are_split_unless_both_ranks_have_the_same_heads() -> None:
    def found(senders: list[range], readers: list[range]) -> list[bool]:
        return [route.split for route in routes_between(senders, readers)]

    assert found(split(8, 2), split(8, 2)) == [False] * 2
    assert found(split(8, 2), split(8, 1)) == [True] * 2
    assert found(split(8, 1), split(8, 2)) == [True] * 2
    assert found([range(1), range(1, 3)], [range(1), range(1, 2), range(2, 3)]) == [
        *(False, True, True)
    ]
    assert found([range(1), range(1), range(1, 2)], [range(1), range(1, 2)]) == [False] * 2


def test_ranges_of_a_peer_are_not_expanded() -> None:
    """A peer may claim any 32-bit numbers; each head of such a range would take minutes."""
    with pytest.raises(ValueError, match="only the prefill worker has head 2"):
        routes_between([range(2**32)], [range(2)])
    with pytest.raises(ValueError, match="only the decode worker has head 2"):
        routes_between([range(2)], [range(2**32)])


def test_a_peer_with_too_many_ranks_is_refused() -> None:
    assert len(routes_between([range(2)], [range(2)] * MAX_RANKS)) == MAX_RANKS
    with pytest.raises(ValueError, match="at most 64 ranks"):
        routes_between([range(2)], [range(2)] * (MAX_RANKS + 1))
