"""Which rank of a prefill worker sends which KV heads to which rank of a decode worker."""

from collections.abc import Iterator, Sequence
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

    The heads of a route are consecutive and on one sender and one reader. If several senders have a
    head, the first of them sends it; several readers may have the same head. The routes to a
    reader are all split, or it has a single one.

    Args:
        senders, readers: KV heads of each rank.

    Raises:
        ValueError: one side lacks a KV head of the other, or has more than `MAX_RANKS` ranks.
    """
    if max(len(senders), len(readers)) > MAX_RANKS:
        raise ValueError(f"a worker has at most {MAX_RANKS} ranks")
    routes = []
    for reader, heads in enumerate(readers):
        for sender, part in _shares(heads, senders, "only the decode worker has head"):
            split = not heads == senders[sender] == part
            routes.append(Route(sender, reader, part, split))
    for heads in senders:
        for _ in _shares(heads, readers, "only the prefill worker has head"):
            pass
    return tuple(routes)


def _shares(heads: range, ranks: Sequence[range], missing: str) -> Iterator[tuple[int, range]]:
    """Yield the ranks that have the heads, and the part of the heads that each provides.

    Raises:
        ValueError: no rank has a head; the message is ``missing`` and the head.
    """
    first = heads.start
    while first < heads.stop:
        rank = next((at for at, own in enumerate(ranks) if first in own), None)
        if rank is None:
            raise ValueError(f"{missing} {first}")
        end = min(heads.stop, ranks[rank].stop)
        yield rank, range(first, end)
        first = end


def heads_of(endpoint: pb.Endpoint) -> range:
    """Return the KV heads of a peer's rank."""
    return range(endpoint.first_kv_head, endpoint.first_kv_head + endpoint.num_kv_heads)
