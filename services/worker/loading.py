"""Start-up of a worker: model, engine, codebooks, and the identity compared in handshakes."""

import uuid
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import structlog
import torch

import codec
from headrace.v1 import prefill_pb2
from runtime.core.options import EngineOptions
from runtime.core.request import max_logprobs
from runtime.engine import Engine, LocalExecutor
from runtime.errors import RuntimeFault
from runtime.models.kernel_plan_hash import kernel_plan_hash
from runtime.models.model import Model
from runtime.pages.plan import PageCount
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
from services.worker.settings import MAX_KV_TOKENS, WorkerSettings
from services.worker.sizes import WorkerSizes
from services.worker.warm_up import warm_up

log = structlog.get_logger()


@dataclass(frozen=True)
class Identity:
    """Identity of one epoch of a worker, and the values that must be equal in its peers.

    Attributes:
        epoch: 32 hex digits.
    """

    worker_id: str
    epoch: str
    model: ModelInfo
    compatibility: Compatibility

    def compatibility_message(self) -> prefill_pb2.Compatibility:
        """Return the compatibility as the handshake sends it."""
        return prefill_pb2.Compatibility(**self.compatibility.model_dump(mode="json"))


@dataclass(frozen=True)
class LoadedRank:
    """One rank of a worker, in the process that runs it.

    Attributes:
        executor: computes the rank's steps, over a cache which transfers read and write.
        codebooks: codebooks of the worker, which all ranks have.
        sizes: sizes of the worker, which all ranks have.
    """

    executor: LocalExecutor
    codebooks: Books
    sizes: WorkerSizes
    device: str

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
            Slab(self.sizes.slots, self.sizes.slot_bytes, self.device),
            agent,
        )


@dataclass(frozen=True)
class Loaded:
    """Result of a worker's start-up.

    Attributes:
        engine: schedules the steps of all ranks.
        rank: the first rank, which the process of the engine runs.
        weight_bytes: size of the model's weights.
    """

    engine: Engine
    rank: LoadedRank
    identity: Identity
    weight_bytes: int


def load_worker(settings: WorkerSettings, *, decodes: bool) -> Loaded:
    """Read the model and the codebooks, build the engine and warm it up.

    Args:
        decodes: whether the worker runs decode steps; on a GPU these are captured as CUDA graphs.

    Raises:
        SettingsError: the model cannot be served; the message says why.
    """
    device = str(torch_device(settings.device))
    try:
        path = resolve_model(settings.model)
        model, model_hash = load_model(path, settings, device)
        sizes = _sizes(model, settings)
        options = EngineOptions(
            pages=_kv_pages(model, settings, sizes),
            limits=sizes.limits,
            kv_eviction=settings.kv_eviction,
            replay=model.replayable,
            decodes=decodes,
            by_layer=settings.decode_graphs == "layer",
        )
        executor = LocalExecutor(model, options)
        engine = Engine(executor)
        codebooks, codebook_id = _codebooks(settings, model)
        warm_up(engine)
    except (RuntimeFault, codec.CodecError, ValueError, OSError, torch.OutOfMemoryError) as error:
        raise SettingsError(f"cannot serve {settings.model}: {error}") from error
    _log_capacity(engine, device)
    info = _model_info(settings.served_model_name or model_name(path), path, model, model_hash)
    identity = Identity(
        worker_id=settings.worker_id,
        epoch=uuid.uuid4().hex,
        model=info,
        compatibility=Compatibility(
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
            chunk_tokens=options.limits.chunk_tokens,
            kv_eviction=options.kv_eviction,
        ),
    )
    return Loaded(
        engine,
        LoadedRank(executor, codebooks, sizes, device),
        identity,
        weight_bytes=model.weight_bytes,
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
    size = kv_bytes_for(
        DeviceMemory.now(model.device),
        utilization=settings.gpu_memory_utilization,
        slab=sizes.slab_bytes + model.replayable * page_bytes.of(plan.null_pages),
        logits=sizes.limits.max_running * model.config.vocab_size,
        least=least_bytes(page_bytes),
    )
    return pools_of_bytes(page_bytes, size, windows, plan.pages(MAX_KV_TOKENS))


def _log_capacity(engine: Engine, device: str) -> None:
    """Log the pages and the memory that is left after warm-up."""
    plan, pages = engine.executor.shape.plan, engine.scheduler.pages.total
    log.info(
        "kv pages",
        pages=plan.by_name(pages),
        kv_tokens=plan.max_tokens(pages),
        memory_left_bytes=None if device == "cpu" else torch.cuda.mem_get_info(device)[0],
    )


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
