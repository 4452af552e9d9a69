"""What HTTP and gRPC have in common: who may ask, what is served, and how much at a time."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from services.common.errors import (
    DeadlineExceeded,
    InternalFault,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServiceError,
    SettingsError,
    Unavailable,
)
from services.common.model_source import model_name, resolve_model
from services.common.tokenizer import Tokenizer, load_tokenizer
from services.gateway.generation import Generator
from services.gateway.keys import ApiKeys
from services.gateway.metrics import GatewayMetrics
from services.gateway.requests import Arrival, Checker, ContextLengthExceeded, GenerationRequest
from services.gateway.router_client import RouterClient
from services.gateway.sessions import Sessions
from services.gateway.settings import GatewaySettings
from services.gateway.text import Piece

log = structlog.get_logger()

# As chat templates know them: `developer` is OpenAI's newer word for `system`.
_ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LONG_TEXT = 4096  # characters; longer ones are tokenized off the event loop
_LONGEST_NAME = 128  # of what a client made up, in an error
_READY_FOR_S = 0.5  # how long one look at the router counts
_MERGE_BATCHES = 32  # of pieces, waiting for a client with several prompts
_RETRY_AFTER_S = 5.0


@dataclass(frozen=True)
class ServedModel:
    """The one model that a gateway serves; ``created`` in seconds since 1970."""

    name: str
    tokenizer: Tokenizer
    context_length: int
    created: int

    @classmethod
    def load(cls, settings: GatewaySettings) -> "ServedModel":
        """Reads the tokenizer of the model that settings name.

        Raises:
            SettingsError: there is no such model, or its tokenizer is not understood.
        """
        path = resolve_model(settings.model)
        tokenizer = load_tokenizer(path)
        context_length = settings.context_length or tokenizer.context_length
        if context_length is None:
            raise SettingsError(f"{path} does not say its context length: set context_length")
        name = settings.served_model_name or model_name(path)
        return cls(name, tokenizer, context_length, int(time.time()))


class Gateway:
    """Everything behind the two public interfaces. Made inside a running event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        model: ServedModel,
        keys: ApiKeys,
        router: RouterClient | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.metrics = GatewayMetrics()
        self.draining = False
        self._keys = keys
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready_until = 0.0
        self._longest_piece = max(map(len, model.tokenizer.pieces))
        self._router = router or RouterClient(
            settings.routers, token=settings.token, timeout_s=settings.connect_timeout_s
        )
        self._sessions = Sessions(
            token=settings.token,
            connect_timeout_s=settings.connect_timeout_s,
            max_held=settings.stream_buffer_tokens,
        )
        self.checker = Checker(
            settings,
            context_length=model.context_length,
            vocab_size=model.tokenizer.vocab_size,
        )
        self._generator = Generator(
            settings,
            model=model.name,
            tokenizer=model.tokenizer,
            router=self._router,
            sessions=self._sessions,
            metrics=self.metrics,
        )

    def arrive(self, request_id: str, authorization: str | None) -> Arrival:
        """The first look at a request that wants work.

        Raises:
            Unauthenticated: its key does not pass.
            Unavailable: the gateway is draining.
        """
        tenant = self._keys.tenant(authorization)
        if self.draining:
            raise Unavailable("the gateway is going away", retry_after_s=_RETRY_AFTER_S)
        now = asyncio.get_running_loop().time()
        return Arrival(request_id, tenant, now, now + self.settings.deadline_s)

    def require_model(self, name: str | None) -> None:
        """Raises `ModelNotFound` unless a request names the served model, or none."""
        if name and name != self.model.name:
            raise ModelNotFound(
                f"the model {name[:_LONGEST_NAME]!r} is not served here, only {self.model.name!r}",
                param="model",
            )

    async def encode_prompt(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ContextLengthExceeded: it cannot fit; seen without tokenizing it, where it is long.
        """
        longest, context = self._longest_piece, self.model.context_length
        if len(text) > longest * context:
            raise ContextLengthExceeded(
                f"{len(text)} characters cannot fit the model's context of {context} tokens",
                param="prompt",
            )
        return await self.encode(text, add_special=add_special)

    async def encode(
        self, text: str, *, add_special: bool, parse_special: bool = True
    ) -> list[int]:
        """Token ids; a long text does not hold up the streams."""
        tokenizer = self.model.tokenizer
        if len(text) <= _LONG_TEXT:
            return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        return await asyncio.to_thread(
            tokenizer.encode, text, add_special=add_special, parse_special=parse_special
        )

    async def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation's prompt.

        Raises:
            InvalidRequest: it is empty, a role is none, or the model's chat template refuses it.
        """
        if not messages:
            raise InvalidRequest("a conversation needs a message", param="messages")
        for at, message in enumerate(messages):
            if message["role"] not in _ROLES:  # a template would write any text into the prompt
                raise InvalidRequest(
                    f"a role is one of {', '.join(_ROLES)}", param=f"messages[{at}].role"
                )
        known = [{**message, "role": _ROLES[message["role"]]} for message in messages]
        prompt = self.model.tokenizer.render_chat(known)
        return await self.encode_prompt(prompt, add_special=False)

    async def answer(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[list[Piece]]:
        """The pieces of all requests, as they come. Close it to cancel.

        Choices are numbered through: those of the first request, then those of the next.

        Raises:
            ServiceError: why one of them has no answer; the others are cancelled.
        """
        with self._admitted(len(requests)):
            if len(requests) == 1:
                pieces = self._generator.run(requests[0])
            else:
                pieces = self._merged(requests)
            async with aclosing(pieces):
                async for batch in pieces:
                    yield batch

    async def ready(self) -> bool:
        """Whether a request would find workers; looks at the routers every half second at most."""
        if self.draining:
            return False
        now = asyncio.get_running_loop().time()
        if now >= self._ready_until:
            if not await self._router.can_place(self.model.name):
                return False
            self._ready_until = now + _READY_FOR_S
        return True

    async def drain(self, limit_s: float) -> None:
        """No new work; what runs may finish, and what has not in time ends with an error."""
        self.draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            self._sessions.fail_all(Unavailable("the gateway is going away"))

    async def close(self) -> None:
        await self._sessions.close()
        await self._router.close()

    @contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        if self._running + count > self.settings.max_concurrent:
            raise Overloaded(
                f"{self._running} prompts are being answered, the limit is "
                f"{self.settings.max_concurrent}",
                retry_after_s=1.0,
            )
        self._running += count
        self.metrics.running.set(self._running)
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= count
            self.metrics.running.set(self._running)
            if not self._running:
                self._idle.set()

    async def _merged(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[list[Piece]]:
        queue: asyncio.Queue[list[Piece] | ServiceError | None] = asyncio.Queue(_MERGE_BATCHES)

        async def follow(request: GenerationRequest, offset: int) -> None:
            async with aclosing(self._generator.run(request)) as pieces:
                async for batch in pieces:
                    for piece in batch:
                        piece.choice += offset
                    await queue.put(batch)

        async def follow_all() -> None:
            end: ServiceError | None = None
            offset = 0
            try:
                async with asyncio.TaskGroup() as group:
                    for request in requests:
                        group.create_task(follow(request, offset))
                        offset += request.choices
            except* ServiceError as errors:
                end = next(e for e in errors.exceptions if isinstance(e, ServiceError))
            except* Exception as errors:  # the reader must hear of it, or it waits for ever
                log.exception("prompts failed")
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
async def within(deadline: float) -> AsyncGenerator[None]:
    """Raises `DeadlineExceeded` where the block lasts past ``deadline``, the event loop's time."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed") from None


def request_id_from(given: str | None) -> str:
    """The client's id, where it is printable and short enough; else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
