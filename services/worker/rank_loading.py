"""Start-up of one rank of a worker: its part of the model, its pages and its codebooks.

All ranks run the same code. A worker of one rank has the only rank, rank 0.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import structlog
import torch

import codec
from runtime.core.options import EngineOptions
from runtime.core.request import max_logprobs
from runtime.engine import LocalExecutor
from runtime.errors import FirstRankEnded, RuntimeFault
from runtime.models.kernel_plan_hash import kernel_facts, kernel_plan_hash
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.pages.prefix import root_hash
from runtime.pages.sizes import least_bytes, pools_of_bytes, pools_of_tokens
from services.common.errors import SettingsError
from services.common.model_source import model_name, resolve_model
from services.common.placement import Compatibility, ModelInfo
from services.tokenizer.identity import TokenizerIdentity
from services.transfer import frame
from services.transfer.agent import TransferAgent
from services.transfer.codecs import Books, SegmentCodecs
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.slab import Slab
from services.worker.device import torch_device
from services.worker.kv_budget import (
    CPU_TOKENS,
    PREEMPTED_TOKENS,
    DeviceMemory,
    kv_bytes_for,
)
from services.worker.model_loading import load_model
from services.worker.peers import NO_PEERS, Peers, RankFacts
from services.worker.settings import MAX_KV_TOKENS, WorkerSettings
from services.worker.sizes import WorkerSizes

log = structlog.get_logger()


@dataclass(frozen=True)
class LoadedRank:
    """One rank of a worker, in the process that runs it.

    Attributes:
        executor: computes the rank's steps, over a cache which transfers read and write.
        codebooks: codebooks of the worker, which all ranks have.
        facts: what the ranks compared.
    """

    executor: LocalExecutor
    codebooks: Books
    facts: RankFacts
    device: str

    @property
    def sizes(self) -> WorkerSizes:
        """Sizes of the worker, which all ranks have."""
        return self.facts.sizes

    @cached_property
    def codecs(self) -> SegmentCodecs:
        """Codecs of the cache. Creating one waits for the device, so all users share these."""
        return SegmentCodecs(
            self.executor.cache.layout,
            self.codebooks,
            first_kv_head=self.executor.shape.config.first_kv_head,
        )

    def new_endpoint(self, agent: TransferAgent) -> LocalEndpoint:
        """Allocate the slab for KV transfers on the device, and register it with an agent.

        Raises:
            TransferUnavailable: the transport refuses the memory.
        """
        return LocalEndpoint(
            self.executor.cache,
            self.codecs,
            Slab(self.sizes.slab_slots, self.sizes.slot_bytes, self.device),
            agent,
        )


@contextmanager
def refusing(settings: WorkerSettings, rank: int) -> Iterator[None]:
    """Raise the errors of models, files, memory and settings as `SettingsError`.

    With several ranks, the message names this one.
    """
    try:
        yield
    except Exception as error:
        refusal = refusal_of(error, settings, rank)
        if refusal is None:
            raise
        raise refusal from error


def refusal_of(error: BaseException, settings: WorkerSettings, rank: int) -> SettingsError | None:
    """Return the error that `refusing` raises for another one; None if it does not replace it."""
    where = f"rank {rank}: " if settings.tp > 1 else ""
    match error:
        case SettingsError():
            return SettingsError(f"{where}{error}")
        case torch.OutOfMemoryError():
            return SettingsError(
                f"{where}not enough GPU memory for {settings.model}, which more GPUs can divide "
                f"(--tp): {error}"
            )
        case FirstRankEnded():
            return None
        case RuntimeFault() | codec.CodecError() | ValueError() | OSError():
            return SettingsError(f"{where}cannot serve {settings.model}: {error}")
    return None


def load_rank(
    settings: WorkerSettings,
    peers: Peers = NO_PEERS,
    *,
    decodes: bool,
) -> LoadedRank:
    """Read a rank's part of the model and the codebooks, and allocate its pages.

    Args:
        peers: the other ranks of the worker; default: none.
        decodes: whether the worker runs decode steps; on a GPU these are captured as CUDA graphs.

    Raises:
        SettingsError: a setting does not fit the model or the device.
        RuntimeFault, CodecError, ValueError, OSError, OutOfMemoryError: see `refusing`.
    """
    device = str(torch_device(settings.device, peers.rank))
    if device == "cpu" and peers.size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # each rank has a core
    path = resolve_model(settings.model)
    model, model_hash = load_model(path, settings, device, peers)
    sizes = _sizes(model, settings)
    codebooks, codebook_id = _codebooks(settings, model)
    info = _model_info(settings.served_model_name or model_name(path), path, model, model_hash)
    compatibility = _compatibility(info, model, settings, sizes, codebook_id)
    facts = peers.agree(
        RankFacts(
            info,
            compatibility,
            sizes,
            _kv_pages(model, settings, sizes),
            model.weight_bytes,
            kernel_facts(model),
        )
    )
    options = EngineOptions(
        pages=facts.pages,
        limits=sizes.limits,
        kv_eviction=settings.kv_eviction,
        replay=model.replayable,
        decodes=decodes,
        by_layer=settings.decode_graphs == "layer",
        prefix_root=_prefix_root(compatibility) if settings.prefix_cache else None,
    )
    return LoadedRank(LocalExecutor(model, options), codebooks, facts, device)


def _compatibility(
    info: ModelInfo,
    model: Model,
    settings: WorkerSettings,
    sizes: WorkerSizes,
    codebook_id: str,
) -> Compatibility:
    return Compatibility(
        model_hash=info.model_hash,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        kv_format=model.kv_format.name,
        kv_format_hash=model.kv_format.artifact_hash,
        kv_format_version=model.kv_format.version,
        page_plan=model.layout.plan,
        codec_version=codec.WIRE_VERSION,
        frame_version=frame.VERSION,
        codec="splitzip" if codebook_id else "raw",
        codebook_id=codebook_id,
        kernel_plan_hash=kernel_plan_hash(model),
        chunk_tokens=sizes.limits.chunk_tokens,
        kv_eviction=settings.kv_eviction,
    )


def _prefix_root(compatibility: Compatibility) -> bytes:
    """Return a hash of what determines the KV of a token, besides the tokens before it."""
    return root_hash(
        compatibility.model_hash,
        compatibility.kv_format,
        str(compatibility.kv_format_version),
        compatibility.kv_format_hash,
    )


def _model_info(name: str, path: Path, model: Model, model_hash: str) -> ModelInfo:
    """Return what gateways and routers know about the model; no other process derives it."""
    config = model.config
    tokenizer = TokenizerIdentity.read(path)
    ends = {*config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())}
    return ModelInfo(
        name=name,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        max_logprobs=max_logprobs(config.vocab_size),
        eos_token_ids=tuple(sorted(ends)),
        model_hash=model_hash,
        tokenizer_hash=tokenizer.hash if tokenizer else "",
    )


def _sizes(model: Model, settings: WorkerSettings) -> WorkerSizes:
    """Return the sizes of the worker, and log them.

    Raises:
        CodecError: the codec does not support the planes of the cache.
        SettingsError: a slot does not hold one page of a layer.
    """
    memory = 0 if model.device.type == "cpu" else torch.cuda.mem_get_info(model.device)[1]
    codecs = SegmentCodecs(model.layout, {})
    sizes = WorkerSizes.of(settings, codecs, gpu_bytes=memory)
    if sizes.slot_bytes < codecs.min_slot_bytes:
        raise SettingsError(
            f"slot_bytes is {sizes.slot_bytes}, but one page of one layer takes "
            f"{codecs.min_slot_bytes}: set slot_bytes to at least that"
        )
    log.info("sizes", **asdict(sizes.limits), slots=sizes.slots, slot_bytes=sizes.slot_bytes)
    return sizes


def _kv_pages(model: Model, settings: WorkerSettings, sizes: WorkerSizes) -> PageCount:
    """Return as many pages as the settings or the memory allow.

    Raises:
        SettingsError: the memory beside the weights does not hold a single page.
    """
    plan, page_bytes, tokens = model.layout.plan, model.layout.page_bytes, settings.kv_tokens
    windows = plan.batch(0, MAX_KV_TOKENS)
    if not settings.holds_prompts:
        prompt = model.context_length
        if not settings.computes_prompts:
            prompt = min(prompt, PREEMPTED_TOKENS)
        windows = plan.batch(sizes.limits.max_running, prompt)
    if tokens == "auto" and model.device.type == "cpu":
        tokens = CPU_TOKENS
    if tokens != "auto":
        return pools_of_tokens(plan, tokens, windows)
    allocated = page_bytes.with_scratch(model.kv_format.scratch_bytes(model.page_size))
    size = kv_bytes_for(
        DeviceMemory.now(model.device),
        utilization=settings.gpu_memory_utilization,
        slab=sizes.slab_bytes + model.replayable * allocated.of(plan.null_pages),
        logits=sizes.limits.max_running * len(model.vocabulary.own),
        least=least_bytes(allocated),
    )
    return pools_of_bytes(allocated, size, windows, plan.pages(MAX_KV_TOKENS))


def _codebooks(settings: WorkerSettings, model: Model) -> tuple[Books, str]:
    """Return codebooks by (layer, plane), and the id that the handshake compares.

    Raises:
        SettingsError: codebooks are required but not given, or none is for this KV format.
    """
    if settings.codebooks is None:
        if settings.codec == "splitzip":
            raise SettingsError(
                "codec splitzip needs codebooks: create them with `headrace calibrate`"
            )
        return {}, ""
    loaded = codec.Codebooks.load(Path(settings.codebooks))
    books = {(layer, name): book for layer, name, book in loaded}
    if not SegmentCodecs(model.layout, books).has_codebooks:
        raise SettingsError(
            f"{settings.codebooks} has no codebook for KV format {model.kv_format.name}"
        )
    return books, loaded.id
