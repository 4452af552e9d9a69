"""Kinds of segments that a worker sends, for which its codec is warmed up."""

from collections.abc import Iterator

from runtime.kv.cache import CacheLayout
from runtime.kv.pages import pages_for
from services.transfer.codecs import SegmentCodecs
from services.transfer.manifest import SegmentPlan, plan_segments
from services.transfer.policy import WireMode


def wire_modes(codecs: SegmentCodecs) -> list[WireMode]:
    """Return the modes in which segments can be sent: without codebooks, only raw."""
    return list(WireMode) if codecs.has_codebooks else [WireMode.RAW]


def kinds_of_segments(
    layout: CacheLayout, codecs: SegmentCodecs, chunk_tokens: int, slot_bytes: int
) -> Iterator[SegmentPlan]:
    """Yield the longest segment of each plane group and number of layers.

    Args:
        chunk_tokens: maximum number of tokens of a chunk.
        slot_bytes: bytes of a slot of the slab.
    """
    seen, tokens = set(), chunk_tokens
    while tokens > 0:
        for plan in plan_segments(
            layout,
            first_token=0,
            num_tokens=tokens,
            pages=tuple(range(pages_for(tokens, layout.page_size))),
            capacity=slot_bytes,
            bound=codecs.max_frame_bytes,
        ):
            kind = plan.extent.plane_group, plan.extent.num_layers
            if kind not in seen:
                seen.add(kind)
                yield plan
        tokens //= 2
