"""Which rank of a prefill worker sends which KV heads to which rank of a decode worker."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.v1 import prefill_pb2 as pb


@dataclass(frozen=True)
class Route:
    """KV heads that one rank sends to another.

    Attributes:
        sender, reader: ranks of the two workers.
        kv_heads: KV heads, counted over all ranks.
    """

    sender: int
    reader: int
    kv_heads: range


def routes_between(
    senders: Sequence[range], readers: Sequence[range], *, is_whole: bool = False
) -> tuple[Route, ...]:
    """Return the routes by which every reader gets its KV heads, each of them once.

    Ranges of a route end where one of a sender or of a reader ends. If several senders have a head,
    the first of them sends it; several readers may have the same head.

    Args:
        senders, readers: KV heads of each rank.
        is_whole: whether the KV heads of a rank must be sent together, as blocks of planes are.

    Raises:
        ValueError: one side lacks a KV head of the other, or heads would have to be split.
    """
    routes = []
    for reader, heads in enumerate(readers):
        first = heads.start
        while first < heads.stop:
            sender = next((at for at, own in enumerate(senders) if first in own), None)
            if sender is None:
                raise ValueError(f"only the decode worker has head {first}")
            end = min(heads.stop, senders[sender].stop)
            routes.append(Route(sender, reader, range(first, end)))
            first = end
            if is_whole and not heads == senders[sender] == routes[-1].kv_heads:
                raise ValueError("this KV format does not split the heads of a rank")
    for head in {head for heads in senders for head in heads}:
        if not any(head in heads for heads in readers):
            raise ValueError(f"only the prefill worker has head {head}")
    return tuple(routes)


def heads_of(endpoint: pb.Endpoint) -> range:
    """Return the KV heads of a peer's rank."""
    return range(endpoint.first_kv_head, endpoint.first_kv_head + endpoint.num_kv_heads)
