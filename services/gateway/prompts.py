"""Texts and conversations to token ids. Large ones are processed outside of the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from services.common.errors import InvalidRequest, Overloaded
from services.gateway.limits import ModelLimits
from services.gateway.requests import ContextLengthExceeded, check_message_count
from services.tokenizer.tokenizer import Tokenizer

# Role names of chat templates. `developer` is OpenAI's newer name for `system`.
_ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}
_SMALL = 4096  # maximum bytes or characters that are processed on the event loop
_ENCODING_THREADS = 2

_M = TypeVar("_M")
_T = TypeVar("_T")


class PromptEncoder:
    """Encodes prompts for the model of a gateway.

    Parsing and rendering run Python code, which the interpreter's lock serializes. They share one
    thread: a second one would not make them faster, but would compete with the event loop for the
    lock. Tokenization releases the lock and has threads of its own.

    Args:
        limits: limits of requests, with the context length.
        max_pending: maximum large prompts in progress; further ones are refused.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, max_pending: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_pending = max_pending
        self._pending = 0
        self._max_token_bytes = max(map(len, tokenizer.pieces))
        self._python = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._encoding = ThreadPoolExecutor(_ENCODING_THREADS, thread_name_prefix="tokenizer")

    async def compute(self, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of ``work``; call it in a thread if ``size`` is large.

        Args:
            size: size of the input, bytes.

        Raises:
            Overloaded: if there are too many large prompts in progress.
        """
        return await self._run(self._python, size, work)

    async def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            ContextLengthExceeded: if the text cannot fit the context, even with the longest tokens.
            Overloaded: as in `compute`.
        """
        self._check_length(len(text), "prompt")
        return await self.encode(text)

    async def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text of any length. The arguments are those of `Tokenizer`.

        Raises:
            Overloaded: as in `compute`.
        """
        encode = partial(
            self._tokenizer.encode, text, add_special=add_special, parse_special=parse_special
        )
        return await self._run(self._encoding, len(text), encode)

    async def encode_chat(
        self, messages: Sequence[_M], as_input: Callable[[_M], dict[str, Any]], size: int
    ) -> list[int]:
        """Return the token ids of a conversation.

        Args:
            as_input: function that returns the ``role`` and the ``content`` of a message.
            size: size of the request, bytes.

        Raises:
            InvalidRequest: if there is no message, a role is unknown, or the chat template of the
                model rejects the messages.
            ContextLengthExceeded: if the messages cannot fit the context.
            Overloaded: as in `compute`.
        """
        if not messages:
            raise InvalidRequest("at least one message is required", param="messages")
        check_message_count(len(messages), self._limits.context_length)
        prompt = await self.compute(size, lambda: self._render(messages, as_input))
        encode = partial(self._tokenizer.encode_rendered, prompt)
        return await self._run(self._encoding, len(prompt), encode)

    def close(self) -> None:
        """Cancel the work that has not started."""
        for pool in (self._python, self._encoding):
            pool.shutdown(wait=False, cancel_futures=True)

    def _render(self, messages: Sequence[_M], as_input: Callable[[_M], dict[str, Any]]) -> str:
        known, characters = [], 0
        for at, message in enumerate(map(as_input, messages)):
            role = _ROLES.get(message["role"])
            if role is None:  # templates copy roles into the prompt
                raise InvalidRequest(
                    f"role must be one of {', '.join(_ROLES)}", param=f"messages[{at}].role"
                )
            known.append({**message, "role": role})
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            characters += sum(map(len, texts))
        self._check_length(characters, "messages")
        return self._tokenizer.render_chat(known)

    def _check_length(self, characters: int, param: str) -> None:
        least = -(-characters // self._max_token_bytes)
        context = self._limits.context_length
        if context is not None and least > context:
            raise ContextLengthExceeded(
                context,
                f"at least {least} tokens ({characters} characters in the {param})",
                param=param,
            )

    async def _run(self, pool: ThreadPoolExecutor, size: int, work: Callable[[], _T]) -> _T:
        if size <= _SMALL:
            return work()
        if self._pending >= self._max_pending:
            raise Overloaded(f"{self._pending} large prompts are being processed, the limit")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self._pending -= 1
