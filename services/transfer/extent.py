"""The part of a sequence's KV that one segment holds."""

from dataclasses import dataclass
from typing import Self

from headrace.v1 import prefill_pb2 as pb


@dataclass(frozen=True)
class Extent:
    """Tokens, layers, KV heads and plane group of a segment.

    Attributes:
        first_token, num_tokens: token range in the sequence; ``first_token`` starts a page.
        first_layer, num_layers: layers of the model.
        first_kv_head, num_kv_heads: KV heads of the model, numbered over all ranks.
        plane_group: index into `runtime.kv.cache.CacheLayout.groups`.
        rank: the sender's rank in its tensor-parallel group.
    """

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    first_kv_head: int
    num_kv_heads: int
    plane_group: int = 0
    rank: int = 0

    @classmethod
    def of(cls, segment: pb.Segment) -> Self:
        """Return the extent in a manifest entry, without validating it."""
        return cls(
            first_token=segment.first_token,
            num_tokens=segment.num_tokens,
            first_layer=segment.first_layer,
            num_layers=segment.num_layers,
            first_kv_head=segment.first_kv_head,
            num_kv_heads=segment.num_kv_heads,
            plane_group=segment.plane_group,
            rank=segment.rank,
        )
