"""The gateway behind HTTP and gRPC: authentication, model, admission, generation, drain."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial

import structlog

from services.common.clients import Client, ClientAddresses
from services.common.errors import (
    DeadlineExceeded,
    InternalFault,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServiceError,
    Unavailable,
)
from services.common.listings import ModelReadiness
from services.common.tracing import NO_SPAN, Span
from services.gateway.buffers import Buffers
from services.gateway.chats import ChatPlanner
from services.gateway.encoding.links import EncoderLinks
from services.gateway.encoding.models import ServedEncoder
from services.gateway.encoding.request import EncodingRequest
from services.gateway.encoding.runner import EncodingRunner
from services.gateway.generation import Generator
from services.gateway.grammars import GrammarChecker
from services.gateway.keys import ApiKeys
from services.gateway.limits import ModelLimits
from services.gateway.metrics import GatewayMetrics
from services.gateway.placer import Placer, Siblings
from services.gateway.prompts import PromptTokenizer
from services.gateway.recent import RecentRequests
from services.gateway.request_builder import RequestBuilder
from services.gateway.requests import GenerationRequest, RequestContext
from services.gateway.router_client import RouterClient
from services.gateway.served import ServedModel
from services.gateway.sessions import SessionPool
from services.gateway.settings import GatewaySettings
from services.gateway.text import TextDelta

log = structlog.get_logger()

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_NAME_CHARS = 128
"""Maximum characters of a client's model name in an error message."""
_READY_CACHE_S = 0.5
"""Time for which an answer of `Gateway.not_ready` is reused, seconds."""
_MERGE_QUEUE_SIZE = 32
"""Maximum number of batches of deltas that are buffered for a request with several prompts."""
_DRAIN_RETRY_AFTER_S = 5.0


class WrongModel(InvalidRequest):
    """The model is served, but does not compute what the request asks for."""

    code = "model_not_supported"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model")


class _Full(Overloaded):
    """The gateway has too many requests in progress."""


class Gateway:
    """State that both public interfaces share. Must be created inside a running event loop.

    Attributes:
        model: the model; without a model that generates text, the encoder.
        encoder: the encoder; None if none is served.
        running: number of prompts, and of requests for the encoder, in progress.
        draining: whether new requests are refused.
        keys: API keys and their tenants.
        router: client of the routers.
        limits: limits of requests that depend on the workers.
        recent: running and recent requests of each tenant.
        builder: builder that validates generation requests.
        chats: planner of chats, for the formats of the model.
        prompts: encoder of prompts and conversations.
        grammars: checks constraints on output.
        buffers: memory for request bodies.
        clients: determines the addresses of clients.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        model: ServedModel,
        keys: ApiKeys,
        router: RouterClient | None = None,
        encoder: ServedEncoder | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.encoder = encoder
        self.limits = ModelLimits(settings)
        self.metrics = GatewayMetrics()
        self.metrics.running.set_function(lambda: self.running)
        self.recent = RecentRequests(self.metrics, keys)
        self.draining = False
        self.keys = keys
        self.running = 0
        self._open_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._asking = asyncio.Lock()
        self._not_ready: str | None = None
        self._ready_until = 0.0
        self._was_ready = False
        self.router = router or RouterClient(
            settings.routers,
            token=settings.token,
            tls=settings.tls,
            timeout_s=settings.connect_timeout_s,
        )
        self._sessions = SessionPool(settings)
        self.clients = ClientAddresses(settings.trusted_proxies)
        self.buffers = Buffers(settings.max_buffered_bytes)
        self.grammars = GrammarChecker(settings, model.tokenizer, self.metrics.grammars)
        self.prompts = PromptTokenizer(model.tokenizer, self.limits, settings.max_concurrent)
        self.chats = ChatPlanner(
            settings,
            model.tokenizer.chat_template,
            model.tokenizer.special_names,
            model.tokenizer.special_tokens,
        )
        self.builder = RequestBuilder(
            settings,
            self.limits,
            model.tokenizer.vocab_size,
            partial(model.tokenizer.encode, add_special=False),
        )
        self._placer = Placer(
            self.router,
            self.metrics,
            model=model.name,
            queue_wait_s=settings.queue_wait_s,
        )
        self._generator = self._new_generator()
        self._links = EncoderLinks(settings)
        self._encoding = self._new_encoding()

    def _new_generator(self) -> Generator:
        return Generator(
            self.settings,
            model=self.model.name,
            tokenizer=self.model.tokenizer,
            identity=self.model.identity,
            placer=self._placer,
            sessions=self._sessions,
            metrics=self.metrics,
            recent=self.recent,
        )

    def _new_encoding(self) -> EncodingRunner:
        encoder = self.encoder or self.model
        return EncodingRunner(
            self.settings,
            identity=encoder.identity,
            placer=self._placer,
            links=self._links,
            metrics=self.metrics,
        )

    def accept(
        self, request_id: str, authorization: str | None, client: Client, span: Span = NO_SPAN
    ) -> RequestContext:
        """Authenticate a request and set its deadline.

        Raises:
            Unauthenticated: if its key is missing or unknown.
            Unavailable: if the gateway is draining.
        """
        tenant = self.keys.tenant(authorization)
        if self.draining:
            raise _shutting_down()
        now = time.monotonic()
        deadline = now + self.settings.deadline_s
        return RequestContext(request_id, tenant, now, deadline, span, client.name)

    def require_model(self, name: str | None) -> None:
        """Check that ``name`` is empty or the model that generates text.

        Raises:
            ModelNotFound: it is another one, or there is none.
            WrongModel: it is the encoder.
        """
        encoder = self.encoder.name if self.encoder else None
        if not self.model.generates and not name:
            raise ModelNotFound(f"no model generates text here, only {encoder!r} is served")
        if name and name == encoder:
            raise WrongModel(
                f"the model {name!r} is an encoder: it serves /v1/embeddings, /v1/rerank and "
                "/v1/score"
            )
        self._check_name(name, self.model.name if self.model.generates else None)

    def require_encoder(self, name: str | None) -> ServedEncoder:
        """Return the encoder if ``name`` is empty or its name.

        Raises:
            ModelNotFound: it is another one, or there is none.
            WrongModel: it is the model that generates text.
        """
        if self.encoder is None and not name:
            raise ModelNotFound("no encoder is served here", param="model")
        if name and self.model.generates and name == self.model.name:
            raise WrongModel(f"the model {name!r} generates text and is not an encoder")
        self._check_name(name, self.encoder.name if self.encoder else None)
        assert self.encoder is not None, "the name of a missing encoder was found"
        return self.encoder

    def _check_name(self, name: str | None, expected: str | None) -> None:
        if name and name != expected:
            names = [self.model.name, *([self.encoder.name] if self.encoder else [])]
            served = " and ".join(map(repr, dict.fromkeys(names)))
            raise ModelNotFound(
                f"the model {name[:_MAX_NAME_CHARS]!r} is not served, only {served}", param="model"
            )

    def has_no_embeddings(self) -> WrongModel:
        """Return the error of a request for embeddings of a cross encoder."""
        name = self.encoder.name if self.encoder else None
        return WrongModel(
            f"the model {name!r} is a cross encoder, which has no embeddings: use /v1/rerank or "
            "/v1/score"
        )

    @property
    def models(self) -> list[tuple[str, int, int | None]]:
        """Name, time of loading and maximum tokens of each served model, if they are known.

        The first one is the model that generates text, if there is one.
        """
        found: list[tuple[str, int, int | None]] = []
        if self.model.generates:
            found.append((self.model.name, self.model.created, self.limits.context_length))
        if self.encoder is not None:
            longest = self.encoder.facts.max_tokens if self.encoder.facts else None
            found.append((self.encoder.name, self.encoder.created, longest))
        return found

    async def encode(self, request: EncodingRequest) -> list[bytes]:
        """Return the output of each input: little-endian float32.

        Raises:
            ServiceError: if the request cannot be completed.
        """
        with self._count(1):
            return await self._encoding.run(request)

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[list[TextDelta]]:
        """Yield the output of all requests as it arrives. Closing the generator cancels them.

        Choice indices are consecutive across requests: the choices of the second request follow
        those of the first.

        Raises:
            ServiceError: if a request cannot be completed. All other requests are then cancelled.
        """
        with self._admit(requests):
            if len(requests) == 1:
                output = self._generator.run(requests[0])
            else:
                output = self._merge(requests)
            async with aclosing(output):
                async for deltas in output:
                    yield deltas

    async def not_ready(self) -> str | None:
        """Return the reason why requests cannot be served now, or None if they can.

        Answers of routers are used for 0.5 s, and concurrent callers share one.
        """
        if self.draining:
            return "draining"
        loop = asyncio.get_running_loop()
        async with self._asking:
            if loop.time() >= self._ready_until:
                self._not_ready = await self._ask_readiness()
                self._ready_until = loop.time() + _READY_CACHE_S
        return self._not_ready

    async def _ask_readiness(self) -> str | None:
        """Return why no request can be served, or None.

        At the start, each model must be ready once. Later, one of them suffices, so that a gateway
        still serves one while the other has no workers.
        """
        reasons = []
        if self.model.generates:
            found = await self.router.readiness(self.model.name)
            self.limits.update(found)
            reasons.append(found.reason or self._unfit(found))
        if self.encoder is not None:
            self.encoder.update(await self.router.encoders(self.encoder.name))
            reasons.append(self.encoder.not_ready)
        self._was_ready = self._was_ready or not any(reasons)
        if self._was_ready and not all(reasons):
            return None
        return next(filter(None, reasons), None)

    def _unfit(self, found: ModelReadiness) -> str | None:
        """Return why the tokenizer fits the model of no ready worker, or None."""
        faults = [self.model.identity.mismatch(info) for info in found.infos]
        if faults and all(faults):
            return f"the gateway's tokenizer does not match the workers' model: {faults[0]}"
        return None

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, and wait for the end of open calls, also of those not yet read.

        After ``limit_s`` seconds, fail all requests that still run.
        """
        self.draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            self._placer.stop(_shutting_down())
            self._sessions.fail_all(_shutting_down())
            self._encoding.fail_all(_shutting_down())

    async def close(self) -> None:
        """Close the sessions with workers, then the connections to routers."""
        await self._sessions.close()
        await self._links.close()
        await self.router.close()
        self.prompts.close()
        await self.grammars.close()

    @contextmanager
    def _admit(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        try:
            with self._count(len(requests)):
                yield
        except _Full as full:
            for request in requests:
                self.recent.refuse(request, full)
            raise

    @contextmanager
    def open_call(self) -> Iterator[None]:
        """Count a call of a client as open in the ``with`` block; `drain` waits for its end."""
        self._open_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open_calls -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if not self.running and not self._open_calls:
            self._idle.set()

    @contextmanager
    def _count(self, count: int) -> Iterator[None]:
        """Count requests as running in the ``with`` block.

        Raises:
            _Full: if there are too many.
        """
        limit = self.settings.max_concurrent
        if self.running + count > limit:
            raise _Full(f"{self.running} prompts are in progress, the limit is {limit}")
        self.running += count
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= count
            self._note_idle()

    async def _merge(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[list[TextDelta]]:
        """Run several requests concurrently. Choice indices are as in `generate`."""
        queue: asyncio.Queue[list[TextDelta] | ServiceError | None]
        queue = asyncio.Queue(_MERGE_QUEUE_SIZE)

        siblings = Siblings()

        async def follow(request: GenerationRequest, offset: int) -> None:
            async with aclosing(self._generator.run(request, siblings)) as output:
                async for deltas in output:
                    for delta in deltas:
                        delta.choice += offset
                    await queue.put(deltas)

        async def follow_all() -> None:
            end: ServiceError | None = None
            offset = 0
            try:
                async with asyncio.TaskGroup() as group:
                    for request in requests:
                        group.create_task(follow(request, offset))
                        offset += request.options.n
            except* ServiceError as errors:
                end = next(e for e in errors.exceptions if isinstance(e, ServiceError))
            except* Exception as errors:  # otherwise the queue's reader would block
                log.exception("unexpected error in a request with several prompts")
                end = InternalFault(f"internal error: {errors.exceptions[0]!r}")
            await queue.put(end)

        following = asyncio.create_task(follow_all())
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, ServiceError):
                    raise item
                yield item
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@asynccontextmanager
async def enforce_deadline(deadline: float) -> AsyncGenerator[None]:
    """Cancel the body of the ``with`` block at ``deadline`` and raise `DeadlineExceeded`.

    ``deadline`` is in monotonic time, seconds.
    """
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed") from None


def _shutting_down() -> Unavailable:
    return Unavailable("the gateway is shutting down", retry_after_s=_DRAIN_RETRY_AFTER_S)


def valid_request_id(given: str | None) -> str:
    """Return the client's request id if it is printable and short, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
