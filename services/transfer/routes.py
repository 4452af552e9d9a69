"""Routes of KV heads from the ranks of a prefill worker to those of a decode worker."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.v1 import prefill_pb2 as pb
from runtime.parallel.partition import MAX_RANKS


@dataclass(frozen=True)
class Route:
    """KV heads that one rank sends to another.

    Attributes:
        sender, reader: ranks of the two workers.
        kv_heads: KV heads, counted over all ranks.
        split: whether one of the ranks has other heads, too, so that blocks of planes are not sent
            as a whole; see `runtime.kv.cache.PlaneGroup`.
    """

    sender: int
    reader: int
    kv_heads: range
    split: bool = False


def routes_between(senders: Sequence[range], readers: Sequence[range]) -> tuple[Route, ...]:
    """Return the routes by which every reader gets its KV heads, each of them once.

    The heads of a route are consecutive and on one sender and one reader. If several senders have
    copies of a head, its readers are divided among them in order. With as many senders as readers,
    each reader therefore reads from the sender of the same number. The routes to a reader are all
    split, or it has a single one.

    Args:
        senders, readers: KV heads of each rank.

    Raises:
        ValueError: one side lacks a KV head of the other, or has more than `MAX_RANKS` ranks.
    """
    if max(len(senders), len(readers)) > MAX_RANKS:
        raise ValueError(f"a worker has at most {MAX_RANKS} ranks")
    routes = []
    for reader, heads in enumerate(readers):
        first = heads.start
        while first < heads.stop:
            holders, copies = _ranks_with(first, senders), _ranks_with(first, readers)
            if not holders:
                raise ValueError(f"only the decode worker has head {first}")
            sender = holders[copies.index(reader) * len(holders) // len(copies)]
            end = min(heads.stop, senders[sender].stop)
            split = not heads == senders[sender] == range(first, end)
            routes.append(Route(sender, reader, range(first, end), split))
            first = end
    for heads in senders:
        first = heads.start
        while first < heads.stop:
            holders = _ranks_with(first, readers)
            if not holders:
                raise ValueError(f"only the prefill worker has head {first}")
            first = readers[holders[0]].stop
    return tuple(routes)


def _ranks_with(head: int, ranks: Sequence[range]) -> list[int]:
    """Return the ranks that have a KV head."""
    return [rank for rank, own in enumerate(ranks) if head in own]


def heads_of(endpoint: pb.Endpoint) -> range:
    """Return the KV heads of a peer's rank."""
    return range(endpoint.first_kv_head, endpoint.first_kv_head + endpoint.num_kv_heads)
