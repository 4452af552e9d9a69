"""Start-up of a worker: its ranks, the engine that schedules for them, and its identity."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
import torch

from headrace.v1 import prefill_pb2
from runtime.engine import Engine
from runtime.grammar.spec import GrammarBounds
from services.common.metrics_server import serving_start
from services.common.model_source import resolve_model
from services.common.placement import Compatibility, ModelInfo
from services.worker.device import torch_device
from services.worker.grammars import Grammars
from services.worker.rank_loading import LoadedRank, load_rank, refusing
from services.worker.ranks.followers import Followers
from services.worker.settings import WorkerSettings
from services.worker.threads import start_in_thread
from services.worker.warm_up import warm_up

T = TypeVar("T")

log = structlog.get_logger()

CAUSE_S = 1.0
"""Time in which the fault of a rank is found after the rank has broken a collective, seconds."""


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
class Loaded:
    """Result of a worker's start-up.

    Attributes:
        engine: schedules the steps of all ranks.
        rank: the first rank, which the process of the engine runs.
        grammars: compiles the grammars of constrained requests.
        followers: the other ranks.
    """

    engine: Engine
    rank: LoadedRank
    identity: Identity
    grammars: Grammars
    followers: Followers = field(default_factory=Followers)


def load_worker(
    settings: WorkerSettings, followers: Followers | None = None, *, decodes: bool
) -> Loaded:
    """Load the first rank, build the engine and warm up all ranks.

    Args:
        followers: the other ranks, which load once the first has hashed the checkpoint; default:
            none.
        decodes: see `load_rank`.

    Raises:
        SettingsError: the model cannot be served; the message says why.
        RankFault: another rank has failed.
    """
    followers = followers or Followers()
    with refusing(settings, rank=0):
        rank = load_rank(settings, followers, decodes=decodes)
        engine = Engine(followers.executor(rank.executor))
        warm_up(engine)
    _log_capacity(engine, rank.device)
    facts = rank.facts
    identity = Identity(settings.worker_id, uuid.uuid4().hex, facts.model, facts.compatibility)
    grammars = Grammars(
        resolve_model(settings.model),
        facts.model.vocab_size,
        facts.model.eos_token_ids,
        GrammarBounds(),
        settings.cached_grammars,
    )
    return Loaded(engine, rank, identity, grammars, followers)


@asynccontextmanager
async def running_ranks(
    settings: WorkerSettings, role: str, *, decodes: bool
) -> AsyncIterator[Loaded]:
    """Start the processes of a worker's ranks and load the worker; end the processes at the end.

    While it loads, ``/health`` and ``/ready`` report how far each rank has started. Must be used on
    the main thread.

    Args:
        role: role of the worker.
        decodes: see `load_rank`.

    Raises:
        SettingsError: the model cannot be served; the message says why, and on which rank.
        RankFault: a rank has failed.
    """
    torch_device(settings.device, rank=settings.tp - 1)  # refused before any process starts
    followers = Followers()
    try:
        followers.start(settings, role, decodes=decodes)
        with serving_start(settings, lambda: followers.stages):
            loading = start_in_thread(lambda: load_worker(settings, followers, decodes=decodes))
            loaded = await _unless_failed(loading, followers)
        yield loaded
        await asyncio.to_thread(followers.end)
    finally:
        followers.kill()


async def _unless_failed(loading: "Future[T]", followers: Followers) -> T:
    """Return the result of loading, or raise the error of the rank that has failed.

    A rank that ends breaks the collectives of the others, too. Its own fault names it.
    """
    fault, loaded = _awaitable(followers.fault), _awaitable(loading)
    either: list[asyncio.Future[Any]] = [loaded, fault]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if followers.ranks and not fault.done() and loaded.exception() is not None:
        await asyncio.wait([fault], timeout=CAUSE_S)
    if fault.done():
        fault.result()
    return await loaded


def _awaitable(future: "Future[T]") -> "asyncio.Future[T]":
    """Return a future for the event loop, whose exception need not be read."""
    wrapped: asyncio.Future[T] = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return wrapped


def _log_capacity(engine: Engine, device: str) -> None:
    """Log the pages and the memory that is left after warm-up."""
    plan, pages = engine.executor.shape.plan, engine.scheduler.pages.total
    log.info(
        "kv pages",
        pages=plan.by_name(pages),
        kv_tokens=plan.max_tokens(pages),
        memory_left_bytes=None if device == "cpu" else torch.cuda.mem_get_info(device)[0],
    )
