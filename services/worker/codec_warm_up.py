"""Warm-up of a rank's codec; with a GPU, on the transfer thread."""

from collections.abc import Iterator

import codec
from runtime.kv.cache import CacheLayout
from runtime.pages.sent import SentTokens
from services.common.errors import SettingsError
from services.transfer.codec_calls import MAX_BATCH
from services.transfer.codecs import SegmentCodecs
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.manifest import SegmentPlan, plan_segments
from services.transfer.policy import WireMode
from services.transfer.slab import Slab
from services.worker.rank_loading import LoadedRank
from services.worker.warm_up import progress_log


def warm_up_transfers(rank: LoadedRank, endpoint: LocalEndpoint) -> None:
    """Warm up the codec. Blocks.

    Raises:
        SettingsError: the codec does not reproduce its input.
    """
    if rank.device == "cpu":
        codec.warm_up()
        return
    progress = progress_log()
    try:
        warmed_up = endpoint.agent.run_on_codec_stream(lambda: warm_up_codec(rank, endpoint.slab))
        segments = warmed_up.result()
    except codec.CodecError as error:
        raise SettingsError(f"the codec does not work with this model: {error}") from error
    progress("codec", segments)


def warm_up_codec(rank: LoadedRank, slab: Slab) -> int:
    """Prepare the codec for all segments of a chunk, and check one segment of each kind.

    The first pages of the cache are encoded into the slab and decoded into the same pages, raw and,
    with codebooks, as SplitZip.

    Returns:
        Number of kinds of segments.

    Raises:
        CodecError: the codec does not reproduce its input.
    """
    tensors = rank.executor.cache.sendable
    codecs = rank.codecs
    modes = list(WireMode) if codecs.has_codebooks else [WireMode.RAW]
    plans = _kinds_of_segments(rank, slab.slot_bytes)
    for plan in plans:
        for mode in modes:
            paged = codecs.of(tensors, plan.extent, mode)
            paged.warm_up(plan.extent.num_tokens, MAX_BATCH)
            tokens = plan.extent.num_tokens
            slot = slab.view(0, slab.slot_bytes)
            segment = codec.EncodeSegment(plan.pages, tokens, 0, slab.slot_bytes)
            encoded = paged.encode_batch([segment], slot)[0].result()
            written = codec.DecodeSegment(plan.pages, tokens, 0, encoded.length, encoded.checksum)
            paged.decode_batch([written], slot)[0].result()
    return len(plans)


def _kinds_of_segments(rank: LoadedRank, slot_bytes: int) -> list[SegmentPlan]:
    """Return the longest segment for each pair of a plane group and a number of layers."""
    layout, codecs = rank.executor.cache.layout, rank.codecs
    pages = min(
        layout.plan.full(rank.sizes.limits.chunk_tokens), *rank.executor.shape.options.pages
    )
    longest: dict[tuple[int, int], SegmentPlan] = {}
    for count in range(1, pages + 1):
        for lacking in (0, 1, layout.page_size - 1):
            tokens = count * layout.page_size - lacking
            for plan in _plans(layout, codecs, slot_bytes, tokens, middle=lacking == 0):
                kind = plan.extent.plane_group, plan.extent.num_layers
                known = longest.get(kind)
                if known is None or known.extent.num_tokens < plan.extent.num_tokens:
                    longest[kind] = plan
    return list(longest.values())


def _plans(
    layout: CacheLayout, codecs: SegmentCodecs, slot_bytes: int, tokens: int, *, middle: bool
) -> Iterator[SegmentPlan]:
    """Return the segments of a chunk.

    Args:
        middle: whether the chunk is one of a longer prompt, without sinks and windows. Otherwise it
            is a whole prompt.
    """
    plan = layout.plan
    pages = tuple(range(plan.pages(tokens)))
    sinks = layout.page_size * max(group.sink_pages for group in plan.groups)
    window = layout.page_size + max(group.window for group in plan.groups)
    return plan_segments(
        layout,
        first_token=sinks if middle else 0,
        num_tokens=tokens,
        page_tables=(pages,) * len(plan.groups),
        sent=SentTokens.whole(plan, sinks + tokens + window if middle else tokens),
        capacity=slot_bytes,
        bound=codecs.max_frame_bytes,
        kv_heads=codecs.kv_heads,
    )
