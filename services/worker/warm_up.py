"""Before a worker is ready: what its first requests would wait for is compiled and captured."""

import time
from collections.abc import Callable, Sequence

import structlog
import torch

import codec
from runtime.engine import Engine
from runtime.kv.pages import pages_for
from services.transfer.codecs import CodecPlan
from services.transfer.frame import HEADER_BYTES
from services.transfer.manifest import plan_segments
from services.transfer.policy import WireMode
from services.worker.settings import WorkerSettings

log = structlog.get_logger()


def warm_up(
    engine: Engine, codebooks: Sequence[codec.Codebook | None], settings: WorkerSettings
) -> None:
    """Of the engine and of the codec; says what took how long, once for each part.

    Raises:
        CodecError: the codec does not give back what it took.
        ValueError: a slot of the slab holds no page of a layer.
    """
    if engine.model.device.type == "cpu":
        codec.warm_up()
        return
    told = _timed()
    engine.warm_up(told)
    for tokens in (1, settings.chunk_tokens):
        tokens = min(tokens, engine.pages_total * engine.cache.page_size)
        told("codec", warm_up_codec(engine, codebooks, tokens, settings.slot_bytes))


@torch.inference_mode()
def warm_up_codec(
    engine: Engine,
    codebooks: Sequence[codec.Codebook | None],
    num_tokens: int,
    slot_bytes: int,
) -> int:
    """Sends a chunk of so many tokens, in the first pages, to these pages: cut into the segments
    that a prefill worker with such slots makes of it, raw and, with codebooks, as SplitZip.

    Returns:
        How many segments these were.
    """
    planes, size, config = engine.cache.planes, engine.cache.page_size, engine.model.config
    plan = CodecPlan(tuple(codebooks))

    def bound(layers: int, tokens: int) -> int:
        shape = (2 * layers, config.num_kv_heads, config.head_dim, tokens, size)
        return HEADER_BYTES + codec.max_segment_bytes(*shape)

    segments = list(
        plan_segments(
            first_token=0,
            num_tokens=num_tokens,
            pages=tuple(range(pages_for(num_tokens, size))),
            page_size=size,
            num_layers=config.num_layers,
            capacity=slot_bytes,
            bound=bound,
        )
    )
    slot = torch.empty(slot_bytes, dtype=torch.uint8, device=engine.model.device)
    for mode in WireMode if any(codebooks) else (WireMode.RAW,):
        for one in segments:
            layers = plan.of(planes, one.first_layer, one.num_layers, mode)
            encoded = layers.encode(one.pages, one.num_tokens, slot).result()
            payload = slot[: encoded.length]
            header = codec.read_header(payload)
            layers.decode(payload, header, one.pages, one.num_tokens).result()
    return len(segments)


def _timed() -> Callable[[str, int], None]:
    """Logs each part that is done, and the time since the one before."""
    since = time.perf_counter()

    def told(stage: str, size: int) -> None:
        nonlocal since
        now = time.perf_counter()
        log.info("warmed up", stage=stage, size=size, ms=round(1e3 * (now - since)))
        since = now

    return told
