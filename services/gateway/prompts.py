"""Texts and conversations to token ids. Large ones are processed outside of the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from services.common.errors import InvalidRequest
from services.common.fair_slots import FairSlots
from services.common.token_ids import TOKEN_BYTES
from services.gateway.chats import ChatPlan, ChatPrompt
from services.gateway.keys import Tenant
from services.gateway.limits import ModelLimits
from services.gateway.request_errors import ContextLengthExceeded, check_message_count
from services.tokenizer.tokenizer import Tokenizer

# Role names of chat templates. `developer` is OpenAI's newer name for `system`.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_ROLES["developer"] = "system"
_SMALL = 4096
"""Maximum size of a request that is processed on the event loop, bytes."""
_SLOTS = 3
"""Maximum number of large requests that are processed at the same time."""
_SLOTS_OF_OWNER = 2
"""Maximum number of slots of one owner. It leaves a slot for others."""

_M = TypeVar("_M")
_T = TypeVar("_T")


def runs_in_thread(size: int) -> bool:
    """Return whether work for a request of ``size`` bytes runs outside of the event loop."""
    return size > _SMALL


class EncodedChat(NamedTuple):
    """A conversation as packed token ids, and whether it ends in a reasoning block."""

    packed: bytes
    is_reasoning: bool


class PromptTokenizer:
    """Encodes prompts for the model of a gateway.

    A request holds a slot while its body is parsed, rendered and tokenized, unless it is small.
    Owners queue for the slots fairly, in bytes. A waiting request holds only its body. The
    parsed and tokenized forms, which may be many times larger, exist only for requests with slots.

    Parsing and rendering run Python code, which the interpreter's lock serializes. They share one
    thread: a second one would not make them faster, but would compete with the event loop for the
    lock. Tokenization releases the lock and has a thread for each slot.

    Sizes are those of the whole request in bytes. Salts are those of `cache_salt`: a large text is
    tokenized faster if it begins like a recent one with the same salt.

    Args:
        limits: limits of requests, with the context length.
        max_waiting: maximum large requests that wait; further ones are refused.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, max_waiting: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_token_bytes = max(map(len, tokenizer.pieces))
        self._slots = FairSlots(_SLOTS, per_tenant=_SLOTS_OF_OWNER, max_waiting=max_waiting)
        self._python = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._encoding = ThreadPoolExecutor(_SLOTS, thread_name_prefix="tokenizer")

    def is_available(self, owner: Tenant, size: int, *, held: int = 0) -> bool:
        """Return whether `slot` would not wait."""
        return size <= _SMALL or held > _SMALL or self._slots.is_free(owner.name)

    def slot(self, owner: Tenant, size: int, *, held: int = 0) -> AbstractAsyncContextManager[None]:
        """Hold a slot for a request in the ``with`` block, if it is large. Cancellation is safe.

        Args:
            held: size for which the request called `slot` before, in whose block it still is. If it
                has a slot, it keeps that one, and only the difference is charged to its owner.

        Raises:
            Overloaded: if too many large requests wait.
        """
        if size <= _SMALL:
            return nullcontext()
        if held > _SMALL:  # a second slot could deadlock with other requests that hold one
            self._slots.charge(owner.name, size - held)
            return nullcontext()
        return self._slots.hold(owner.name, weight=owner.weight, cost=size)

    async def compute(self, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of ``work``; call it in a thread if the request is large."""
        return await self._run(self._python, size, work)

    async def tokenize(self, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of ``work``, which mostly tokenizes; otherwise as `compute`."""
        return await self._run(self._encoding, size, work)

    async def encode_prompt(
        self,
        text: str,
        size: int,
        salt: bytes,
        *,
        add_special: bool = True,
        truncates: bool = False,
    ) -> bytes:
        """Return the packed token ids of a prompt.

        Args:
            add_special: see `Tokenizer.encode`.
            truncates: whether the prompt will be cut, so that it may exceed the context.

        Raises:
            ContextLengthExceeded: if the text cannot fit the context, even with the longest tokens.
        """
        if not truncates:
            self._check_length(len(text), "prompt")
        pack = partial(self._tokenizer.pack, text, add_special=add_special, salt=salt)
        return await self._run(self._encoding, size, pack)

    async def encode(
        self,
        text: str,
        size: int,
        salt: bytes,
        *,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> list[int]:
        """Return the token ids of a text of any length. The arguments are those of `Tokenizer`."""
        encode = partial(
            self._tokenizer.encode,
            text,
            add_special=add_special,
            parse_special=parse_special,
            salt=salt,
        )
        return await self._run(self._encoding, size, encode)

    async def encode_chat(
        self,
        messages: Sequence[_M],
        as_input: Callable[[_M], dict[str, Any]],
        plan: ChatPlan,
        size: int,
        salt: bytes,
        *,
        truncates: bool = False,
    ) -> EncodedChat:
        """Return the packed token ids of a conversation.

        Args:
            as_input: function that returns a message as `ChatTemplate.render` takes it.
            truncates: whether the prompt will be cut, so that it may exceed the context.

        Raises:
            InvalidRequest: if there is no message, a role is unknown, or the chat template of the
                model rejects the messages.
            ContextLengthExceeded: if the messages cannot fit the context.
        """
        if not messages:
            raise InvalidRequest("at least one message is required", param="messages")
        check_message_count(len(messages), self._limits.context_length)
        prompt = await self.compute(
            size, lambda: self._render(messages, as_input, plan, truncates=truncates)
        )
        pack = partial(self._tokenizer.pack_rendered, prompt.text, salt=salt)
        packed = await self._run(self._encoding, size, pack)
        return EncodedChat(packed, prompt.is_reasoning)

    def close(self) -> None:
        """Cancel the work that has not started."""
        for pool in (self._python, self._encoding):
            pool.shutdown(wait=False, cancel_futures=True)

    def _render(
        self,
        messages: Sequence[_M],
        as_input: Callable[[_M], dict[str, Any]],
        plan: ChatPlan,
        *,
        truncates: bool,
    ) -> ChatPrompt:
        known = []
        characters = 0
        for at, message in enumerate(map(as_input, messages)):
            role = _ROLES.get(message["role"])
            if role is None:  # templates copy roles into the prompt
                raise InvalidRequest(
                    f"role must be one of {', '.join(_ROLES)}", param=f"messages[{at}].role"
                )
            known.append({**message, "role": role})
            content = message["content"] or ""
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            characters += sum(map(len, texts))
        if not truncates:
            self._check_length(characters, "messages")
        return plan.render(self._tokenizer, known)

    def _check_length(self, characters: int, param: str) -> None:
        least = -(-characters // self._max_token_bytes)
        context = self._limits.context_length
        if context is not None and least > context:
            raise ContextLengthExceeded(
                context,
                f"at least {least} tokens ({characters} characters in the {param})",
                param=param,
                prompt_tokens=least,
            )

    async def _run(self, pool: ThreadPoolExecutor, size: int, work: Callable[[], _T]) -> _T:
        if not runs_in_thread(size):
            return work()
        working = pool.submit(work)
        result = asyncio.wrap_future(working)
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            working.cancel()
            while not result.done():  # it occupies a thread, and hence its slot, until its end
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([result])
            if not result.cancelled():
                result.exception()  # retrieved, so that asyncio does not log it
            raise
        try:
            return result.result()
        finally:
            del working, result  # an error in them would form a reference cycle with this frame


def truncated(
    packed: bytes, limit: int, *, side: str, max_tokens: int, context_length: int
) -> bytes:
    """Return a prompt that is cut to a number of tokens.

    Args:
        packed: token ids of the prompt, see `services.common.token_ids`.
        limit: maximum tokens; -1 for as many as fit the context beside ``max_tokens``.
        side: side on which the prompt is cut, "left" or "right".

    Raises:
        InvalidRequest: the limit is 0 or exceeds the context.
    """
    if limit == 0 or limit > context_length:
        name = "truncate_prompt_tokens"
        raise InvalidRequest(f"{name} must be -1, or from 1 to {context_length}", param=name)
    if limit == -1:
        limit = max(1, context_length - max_tokens)
    size = limit * TOKEN_BYTES
    return packed[-size:] if side == "left" else packed[:size]
