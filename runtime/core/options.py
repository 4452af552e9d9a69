"""Options of an engine and its executors."""

from dataclasses import dataclass

from runtime.core.limits import Limits
from runtime.pages.plan import PageCount


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine. They are equal on all ranks of a worker.

    Attributes:
        pages: number of pages of each page group that sequences can use, without null pages.
        limits: limits of the batch, the queue and the tokens of a step.
        kv_eviction: fraction of the tokens of a prompt to evict, see `runtime.pages.eviction`.
        replay: whether to launch steps as CUDA graphs. Without replay, the host takes longer to
            launch kernels than the device takes to run them. Replay does not change tokens, but
            they are reported one step later.
        decodes: whether the engine decodes. False on a prefill worker, which needs no graphs of
            passes that decode.
        prefix_root: hash of the model and the KV format, by which computed pages are found again
            (`runtime.pages.prefix`); None: no sequence reuses the pages of another one.
        by_layer: whether to capture a decode graph for each layer, as FlashSVD v1.5 does, instead
            of one for the whole pass. The decode megakernel is then not used.
    """

    pages: PageCount
    limits: Limits
    kv_eviction: float = 0.0
    replay: bool = False
    decodes: bool = True
    by_layer: bool = False
    prefix_root: bytes | None = None
