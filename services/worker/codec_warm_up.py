"""Warm-up of the codec on the transfer thread of a worker with a GPU."""

import asyncio
from collections.abc import Iterator

import codec
from runtime.core.window import stored_pages
from runtime.kv.pages import pages_for
from services.common.errors import SettingsError
from services.transfer.agent import TransferAgent
from services.transfer.codec_calls import MAX_BATCH
from services.transfer.codecs import SegmentCodecs
from services.transfer.manifest import SegmentPlan, plan_segments
from services.transfer.policy import WireMode
from services.transfer.slab import Slab
from services.worker.loading import Loaded
from services.worker.warm_up import progress_log


async def warm_up_transfers(loaded: Loaded, agent: TransferAgent, slab: Slab) -> None:
    """Warm up the codec on the transfer thread. Does nothing on a CPU.

    Raises:
        SettingsError: the codec does not reproduce its input.
    """
    if loaded.device == "cpu":
        return
    progress = progress_log()
    try:
        segments = await asyncio.wrap_future(
            agent.run_on_codec_stream(lambda: warm_up_codec(loaded, slab))
        )
    except codec.CodecError as error:
        raise SettingsError(f"the codec does not work with this model: {error}") from error
    progress("codec", segments)


def warm_up_codec(loaded: Loaded, slab: Slab) -> int:
    """Prepare the codec for all segments of a chunk, and check one segment of each kind.

    The first pages of the cache are encoded into the slab and decoded into the same pages, raw and,
    with codebooks, as SplitZip.

    Returns:
        Number of kinds of segments.

    Raises:
        CodecError: the codec does not reproduce its input.
    """
    planes = loaded.engine.cache.planes
    codecs = loaded.codecs
    modes = list(WireMode) if codecs.has_codebooks else [WireMode.RAW]
    plans = list(_kinds_of_segments(loaded, codecs, slab.slot_bytes))
    for plan in plans:
        for mode in modes:
            paged = codecs.of(planes, plan.extent, mode)
            paged.warm_up(plan.extent.num_tokens, MAX_BATCH)
            tokens = plan.extent.num_tokens
            encoded = paged.encode(plan.pages, tokens, slab.view(0, slab.slot_bytes)).result()
            payload = slab.view(0, encoded.length)
            paged.decode(payload, codec.read_header(payload), plan.pages, tokens).result()
    return len(plans)


def _kinds_of_segments(
    loaded: Loaded, codecs: SegmentCodecs, slot_bytes: int
) -> Iterator[SegmentPlan]:
    """Yield the longest segment of each plane group and number of layers."""
    layout, seen = loaded.engine.cache.layout, set()
    exact, stored = loaded.engine.num_pages
    if layout.has_stored:
        exact = min(exact, stored)
    tokens = min(loaded.sizes.chunk_tokens, exact * layout.page_size)
    while tokens > 0:
        plans = plan_segments(
            layout,
            first_token=0,
            num_tokens=tokens,
            pages=tuple(range(pages_for(tokens, layout.page_size))),
            stored=tuple(range(stored_pages(tokens, layout.page_size))),
            capacity=slot_bytes,
            bound=codecs.max_frame_bytes,
        )
        for plan in sorted(plans, key=lambda plan: plan.extent.num_tokens, reverse=True):
            kind = plan.extent.plane_group, plan.extent.num_layers
            if kind not in seen:
                seen.add(kind)
                yield plan
        tokens //= 2
