"""Real workers over a tiny model, in one process: gRPC on loopback, NIXL between their agents."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import codec
from headrace.v1 import decode_pb2, prefill_pb2_grpc, request_pb2, sampling_pb2
from headrace.v1 import prefill_pb2 as pb
from headrace.v1.prefill_pb2_grpc import PrefillStub
from runtime.core.request import max_logprobs
from runtime.engine import Add, Engine, LocalExecutor, Reserved
from runtime.grammar.spec import GrammarBounds
from runtime.models.build import build_model
from runtime.pages.plan import PAGE_SIZE
from runtime.pages.prefix import root_hash
from services.common.grpc_server import GrpcServer, MessageStream, next_message, open_channel
from services.common.placement import Compatibility, ModelInfo
from services.common.token_ids import pack_tokens
from services.decode.service import DecodeWorker
from services.decode.settings import DecodeSettings
from services.prefill.service import PrefillWorker
from services.prefill.settings import PrefillSettings
from services.transfer import frame
from services.transfer.agent import TransferAgent
from services.transfer.codecs import SegmentCodecs
from services.transfer.endpoint import KVEndpoint
from services.transfer.fetch import Fetch
from services.transfer.local_endpoint import Endpoints
from services.transfer.slab import Slab
from services.worker.codec_warm_up import warm_up_codec
from services.worker.grammars import Grammars
from services.worker.loading import Identity, Loaded
from services.worker.peers import RankFacts
from services.worker.prefill_service import SERVICE
from services.worker.rank_loading import LoadedRank
from services.worker.settings import WorkerSettings
from services.worker.sizes import WorkerSizes
from services.worker.stream_service import StreamService
from services.worker.streams import Stream, StreamSession
from tests.runtime.tiny import (
    CONFIG,
    checkpoint_for,
    drive,
    engine_of,
    executor_of,
    prompt_of,
    request_of,
)

LIMIT_S = 60.0  # seconds, for operations that take milliseconds
CHUNK = 32  # tokens of a prefill chunk and of a segment
SLOT_BYTES = 1 << 14
DEFAULTS = {"codec": "raw", "slot_bytes": SLOT_BYTES, "prefix_cache": False}
"""Settings of workers. Tests send the same prompt several times, so that there is no cache."""

_numbers = itertools.count(1)


@cache
def compile_loops(kv_format: str) -> None:
    """Compile what a step needs, which takes longer than `LIMIT_S` if the machine is busy."""
    model = build_model(checkpoint_for(kv_format), kv_format=kv_format)
    engine = engine_of(model, chunk_tokens=CHUNK)
    drive(engine, *(Add(request_of(str(tokens), tokens)) for tokens in (1, CHUNK, 160)))


@cache
def compile_codec(kv_format: str, codebooks: bool) -> None:
    """Compile what a transfer needs; see `compile_loops`."""
    warm_up_codec(_load(kv_format=kv_format, codebooks=codebooks).rank, Slab(1, SLOT_BYTES))


def load(
    *,
    codebooks: bool = False,
    kv_format: str = "dense",
    kv_eviction: float = 0.0,
    pages: int = 64,
    prefix_cache: bool = False,
) -> Loaded:
    """Return a loaded worker; workers are compatible if both or neither have codebooks.

    All planes have the same codebook, calibrated with normally distributed numbers.
    """
    compile_loops(kv_format)
    compile_codec(kv_format, codebooks)
    return _load(
        codebooks=codebooks,
        kv_format=kv_format,
        kv_eviction=kv_eviction,
        pages=pages,
        prefix_cache=prefix_cache,
    )


def _load(
    *,
    codebooks: bool = False,
    kv_format: str = "dense",
    kv_eviction: float = 0.0,
    pages: int = 64,
    prefix_cache: bool = False,
) -> Loaded:
    tiny = build_model(checkpoint_for(kv_format), kv_format=kv_format)
    root = root_hash(kv_format) if prefix_cache else None
    engine = engine_of(
        tiny, pages=pages, chunk_tokens=CHUNK, kv_eviction=kv_eviction, prefix_root=root
    )
    model = ModelInfo(
        name="tiny",
        context_length=CONFIG.context_length,
        vocab_size=CONFIG.vocab_size,
        max_logprobs=max_logprobs(CONFIG.vocab_size),
        model_hash="tiny",
    )
    compatibility = Compatibility(
        model_hash="tiny",
        context_length=CONFIG.context_length,
        kv_format=kv_format,
        kv_format_hash="",
        kv_format_version=1,
        page_plan=tiny.layout.plan,
        codec_version=codec.WIRE_VERSION,
        frame_version=frame.VERSION,
        codec="splitzip" if codebooks else "raw",
        codebook_id="normal" if codebooks else "",
        kernel_plan_hash="tiny",
        chunk_tokens=CHUNK,
        kv_eviction=kv_eviction,
    )
    identity = Identity(f"worker-{next(_numbers)}", uuid.uuid4().hex, model, compatibility)
    book = normal_codebook()
    books = {(layer, plane.name): book for layer, plane in tiny.layout.planes}
    sizes = WorkerSizes(engine.executor.shape.options.limits, slots=2, slot_bytes=SLOT_BYTES)
    facts = RankFacts(
        model, compatibility, sizes, engine.scheduler.pages.total, 1 << 20, {"matmul": "dense"}
    )
    rank = LoadedRank(executor_of(engine), books if codebooks else {}, facts, "cpu")
    grammars = Grammars(Path("tiny"), CONFIG.vocab_size, [1], GrammarBounds(), 8)
    return Loaded(engine, rank, identity, grammars)


def loaded_of(settings: WorkerSettings, pages: int = 64) -> Loaded:
    """Return a loaded worker with these settings and this number of KV pages."""
    loaded = load(
        codebooks=settings.codec != "raw",
        kv_format=settings.kv_format,
        kv_eviction=settings.kv_eviction,
        pages=pages,
        prefix_cache=settings.prefix_cache,
    )
    return with_sizes(loaded, sizes_of(loaded, settings))


def with_sizes(loaded: Loaded, sizes: WorkerSizes) -> Loaded:
    """Return a loaded worker whose rank has other sizes."""
    return with_rank(loaded, facts=replace(loaded.rank.facts, sizes=sizes))


def with_rank(loaded: Loaded, **changes: Any) -> Loaded:
    """Return a loaded worker whose rank has other attributes."""
    return replace(loaded, rank=replace(loaded.rank, **changes))


def sizes_of(loaded: Loaded, settings: WorkerSettings) -> WorkerSizes:
    """Return the sizes that the settings ask for."""
    codecs = SegmentCodecs(loaded.rank.executor.cache.layout, {})
    return WorkerSizes.of(settings, codecs, gpu_bytes=0)


def normal_codebook() -> codec.Codebook:
    numbers = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    return codec.calibrate(numbers.bfloat16())


@dataclass
class Prefill:
    """A serving prefill worker; `Site.prefill` may leave its engine thread stopped."""

    worker: PrefillWorker
    loaded: Loaded
    server: GrpcServer
    agent: TransferAgent
    address: decode_pb2.WorkerAddress

    @property
    def slab(self) -> Slab:
        return self.worker.endpoints[0].slab

    def metric(self, name: str) -> float | None:
        """Return a metric's value as of the last `observe`."""
        return self.worker.metrics.registry.get_sample_value(name)


@dataclass
class Decode:
    """A decode worker.

    Attributes:
        server: serves history to prefill workers; None if the worker does not. Streams are opened
            without a server.
    """

    worker: DecodeWorker
    loaded: Loaded
    agent: TransferAgent
    server: GrpcServer | None = None

    @property
    def slab(self) -> Slab:
        return self.worker.endpoints[0].slab

    def planes(self) -> list[torch.Tensor]:
        return list(self.loaded.rank.executor.cache.planes)

    def landing_slots(self) -> dict[str, float | None]:
        """Return the current values of the gauge by state."""
        self.worker.observe()
        value = self.worker.metrics.registry.get_sample_value
        states = ("held", "quarantined")
        return {state: value("headrace_kv_landing_slots", {"state": state}) for state in states}


@dataclass(frozen=True)
class Ranked:
    """The ranks of a worker.

    Attributes:
        first: the executor of the first rank.
        others: endpoints of the other ranks.
    """

    engine: Engine
    first: LocalExecutor
    others: tuple[KVEndpoint, ...] = ()


def ranked(loaded: Loaded, ranks: Ranked | None) -> tuple[Loaded, tuple[KVEndpoint, ...]]:
    """Return a worker with other ranks, and the endpoints of all but the first."""
    if ranks is None:
        return loaded, ()
    ranked = with_rank(loaded, executor=ranks.first)
    return replace(ranked, engine=ranks.engine), ranks.others


async def _close(endpoints: Endpoints) -> None:
    for endpoint in endpoints:
        await asyncio.to_thread(endpoint.close)


class Site:
    """Starts workers, and stops all of them on `close`."""

    def __init__(self) -> None:
        self._prefills: list[Prefill] = []
        self._decodes: list[Decode] = []

    async def prefill(
        self,
        make_agent: Callable[[str], TransferAgent] = TransferAgent,
        *,
        started: bool = True,
        pages: int = 64,
        ranks: Ranked | None = None,
        **changes: object,
    ) -> Prefill:
        settings = PrefillSettings.model_validate({**DEFAULTS, "slots": 4, **changes})
        loaded, others = ranked(loaded_of(settings, pages), ranks)
        agent = make_agent(f"prefill-{loaded.identity.epoch}")
        worker = PrefillWorker(settings, loaded, (loaded.rank.new_endpoint(agent), *others))
        server = GrpcServer("127.0.0.1:0", [SERVICE], token_check=settings.token_check)
        prefill_pb2_grpc.add_PrefillServicer_to_server(worker.prefills, server.server)
        await server.start()
        address = decode_pb2.WorkerAddress(
            worker_id=loaded.identity.worker_id,
            epoch=loaded.identity.epoch,
            address=f"127.0.0.1:{server.port}",
        )
        self._prefills.append(Prefill(worker, loaded, server, agent, address))
        if started:
            worker.engine.start()
        return self._prefills[-1]

    async def decode(
        self,
        make_agent: Callable[[str], TransferAgent] = TransferAgent,
        *,
        started: bool = True,
        pages: int = 64,
        ranks: Ranked | None = None,
        **changes: object,
    ) -> Decode:
        settings = DecodeSettings.model_validate(
            {**DEFAULTS, "slots": 3, "ping_timeout_s": 20, "compute_tokens": 0, **changes}
        )
        loaded, others = ranked(loaded_of(settings, pages), ranks)
        agent = make_agent(f"decode-{loaded.identity.epoch}")
        worker = DecodeWorker(settings, loaded, (loaded.rank.new_endpoint(agent), *others))
        server = None
        if worker.history is not None:
            server = GrpcServer("127.0.0.1:0", [SERVICE], token_check=settings.token_check)
            prefill_pb2_grpc.add_PrefillServicer_to_server(worker.history, server.server)
            await server.start()
            worker.serve_at(f"127.0.0.1:{server.port}")
        if started:
            worker.engine.start()
        self._decodes.append(Decode(worker, loaded, agent, server))
        return self._decodes[-1]

    async def close(self) -> None:
        for decode in self._decodes:
            if decode.server is not None:
                await decode.server.stop(0)
            await decode.worker.close()
            await _close(decode.worker.endpoints)
        for prefill in self._prefills:
            await prefill.server.stop(0)
            await prefill.worker.close()
            await _close(prefill.worker.endpoints)


def message_of(tokens: int, max_tokens: int = 8) -> request_pb2.Request:
    return request_pb2.Request(
        request_id=f"request-{next(_numbers)}",
        placement_id="placement",
        tokens=pack_tokens(prompt_of(tokens)),
        prompt_tokens=tokens,
        sampling=sampling_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
        max_tokens=max_tokens,
        choices=1,
    )


def start_of(tokens: int, max_tokens: int = 8, sequence: int = 0) -> pb.StartPrefill:
    return pb.StartPrefill(
        sequence=sequence, request=message_of(tokens, max_tokens), deadline_s=LIMIT_S
    )


def fetch_of(prefill: Prefill, tokens: int, first_page: int = 0, *, first_token: int = 0) -> Fetch:
    """Return a fetch from ``first_token`` into consecutive pages from ``first_page``.

    The pages of all page groups have the same numbers.
    """
    key = f"sequence-{next(_numbers)}"
    request = message_of(tokens)
    reserved: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
    pages = tuple(range(first_page, first_page - (-tokens // PAGE_SIZE)))
    sent = prefill.worker.sent_tokens(request, first_token)
    reserved.set_result(Reserved(key, (pages,) * len(sent.plan.groups)))
    return Fetch(
        key=key,
        prefill=prefill.address,
        request=request,
        reserved=reserved,
        sent=sent,
        on_first=lambda first: False,
        on_verified=lambda times: None,
        deadline_s=LIMIT_S,
    )


def open_stream(
    decode: Decode, prefill: Prefill, number: int, tokens: int, max_tokens: int = 8
) -> Stream:
    """Open a stream on a decode worker, as a gateway does."""
    start = decode_pb2.StartStream(
        stream=number,
        epoch=decode.worker.identity.epoch,
        prefill=prefill.address,
        deadline_s=LIMIT_S,
        request=message_of(tokens, max_tokens),
    )
    return start_stream(decode.worker.service, start).streams[number]


def start_stream(service: StreamService, start: decode_pb2.StartStream) -> StreamSession:
    """Start a stream in a new session, which keeps its output."""
    name = f"gateway-{start.stream}"
    session = StreamSession(name, service.open, service.drop, service.cancel_choice)
    session._start(start)
    return session


def output_of(session: StreamSession) -> decode_pb2.StreamDelta:
    """Return all output of the stream of a session from `start_stream`."""
    return next(iter(session.outbox.deltas.values()), decode_pb2.StreamDelta())


@asynccontextmanager
async def session_with(prefill: Prefill) -> AsyncIterator["ReaderSession"]:
    """Open a reader's session, after the handshake, for the test to drive."""
    hello = pb.Hello(
        worker_id="reader",
        epoch="0" * 32,
        expected_epoch=prefill.address.epoch,
        compatibility=prefill.loaded.identity.compatibility_message(),
        slot_bytes=SLOT_BYTES,
    )
    async with open_channel(prefill.address.address, ping_timeout_s=20) as channel:
        stream: MessageStream = PrefillStub(channel).Session()
        session = ReaderSession(stream)
        await session.send(pb.PrefillCommand(hello=hello))
        assert (await session.event()).WhichOneof("event") == "welcome"
        yield session
        stream.cancel()


class ReaderSession:
    """A reader's side of a session, driven by a test."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream
        self._events: list[pb.PrefillEvent] = []

    async def send(self, *commands: pb.PrefillCommand) -> None:
        """Send commands in one message."""
        await self._stream.write(pb.PrefillCommands(commands=commands))

    async def event(self) -> pb.PrefillEvent:
        """Return the next event."""
        while not self._events:
            message = await asyncio.wait_for(next_message(self._stream), LIMIT_S)
            assert message is not None
            self._events += message.events
        return self._events.pop(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, by polling."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - polling in a test
            await asyncio.sleep(0.005)
