"""Warm-up of a worker before it is ready: kernel compilation and graph capture."""

import time
from collections.abc import Callable

import structlog
import torch

import codec
from runtime.engine import Engine
from runtime.kv.pages import pages_for
from services.transfer.codecs import Books, SegmentCodecs
from services.transfer.manifest import plan_segments
from services.transfer.policy import WireMode
from services.worker.sizes import WorkerSizes

log = structlog.get_logger()


def warm_up(engine: Engine, codebooks: Books, sizes: WorkerSizes) -> None:
    """Warm up the engine and the codec, and log how long each part took.

    Raises:
        CodecError: the codec does not reproduce its input.
        ValueError: a slot of the slab does not hold one page of a layer.
    """
    if engine.model.device.type == "cpu":
        codec.warm_up()
        return
    progress = _progress_log()
    engine.warm_up(progress)
    for tokens in (1, sizes.chunk_tokens):
        tokens = min(tokens, engine.pages_total * engine.cache.page_size)
        progress("codec", warm_up_codec(engine, codebooks, tokens, sizes.slot_bytes))


@torch.inference_mode()
def warm_up_codec(engine: Engine, codebooks: Books, num_tokens: int, slot_bytes: int) -> int:
    """Encode the first pages and decode them into the same pages.

    The pages are cut into the segments that a prefill worker makes of a chunk of ``num_tokens``
    with slots of ``slot_bytes``. They are sent raw and, with codebooks, as SplitZip.

    Returns:
        Number of segments.
    """
    planes, layout = engine.cache.planes, engine.cache.layout
    codecs = SegmentCodecs(layout, codebooks)
    plans = list(
        plan_segments(
            layout,
            first_token=0,
            num_tokens=num_tokens,
            pages=tuple(range(pages_for(num_tokens, layout.page_size))),
            capacity=slot_bytes,
            bound=codecs.max_frame_bytes,
        )
    )
    slot = torch.empty(slot_bytes, dtype=torch.uint8, device=engine.model.device)
    for mode in WireMode if codecs.has_codebooks else (WireMode.RAW,):
        for plan in plans:
            segment = codecs.of(planes, plan.extent, mode)
            encoded = segment.encode(plan.pages, plan.extent.num_tokens, slot).result()
            payload = slot[: encoded.length]
            header = codec.read_header(payload)
            segment.decode(payload, header, plan.pages, plan.extent.num_tokens).result()
    return len(plans)


def _progress_log() -> Callable[[str, int], None]:
    """Return a callback that logs a finished stage and the time since the one before."""
    since = time.perf_counter()

    def progress(stage: str, size: int) -> None:
        nonlocal since
        now = time.perf_counter()
        log.info("warmed up", stage=stage, size=size, ms=round(1e3 * (now - since)))
        since = now

    return progress
