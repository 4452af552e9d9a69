"""Compiled grammars of a worker, by tenant."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.errors import InvalidRequest
from runtime.grammar.compiler import Grammar, compile_grammar
from runtime.grammar.matcher import Matcher
from runtime.grammar.spec import GrammarBounds, GrammarSpec, InvalidGrammar
from runtime.grammar.vocabulary import GrammarVocabulary
from services.common.errors import SettingsError
from services.tokenizer.loading import load_tokenizer

_THREADS = 2
_MAX_OF_TENANT = 4
"""One tenant may hold at most this fraction of the cached grammars."""

_Key = tuple[bytes, GrammarSpec]


class Grammars:
    """Compiles grammars on threads of its own, so that neither the event loop nor the engine waits.

    Requests with the same constraint and the same salt share a compiled grammar. Gateways have
    compiled the constraint before, within a time limit.

    Args:
        model: path of the model, whose tokenizer is read when the first grammar is compiled.
        vocab_size: number of token ids of the model.
        eos_ids: tokens that end its output.
        bounds: bounds on constraints.
        capacity: maximum number of compiled grammars. The least recently used one is dropped,
            first of a salt that has more than a quarter of them.

    Attributes:
        hits: number of requests whose grammar was compiled before.
        compile_times: durations of compilations that no metric has yet, seconds.
    """

    def __init__(
        self,
        model: Path,
        vocab_size: int,
        eos_ids: Sequence[int],
        bounds: GrammarBounds,
        capacity: int,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._bounds = bounds
        self._capacity = capacity
        self.hits = 0
        self.compile_times: deque[float] = deque()
        self._vocabulary: asyncio.Task[GrammarVocabulary] | None = None
        self._compiled: OrderedDict[_Key, asyncio.Task[Grammar]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    async def start(self, spec: GrammarSpec, salt: bytes, output: Sequence[int]) -> Matcher:
        """Return the state of a constraint after output tokens.

        Args:
            salt: salt of the request, see `runtime.core.request.Request`.
            output: output tokens that the client has already received.

        Raises:
            InvalidRequest: the constraint cannot be compiled, or does not allow the tokens.
        """
        key = salt, spec
        task = self._compiled.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._compiled[key] = asyncio.create_task(self._compile(spec))
            self._drop_old(salt)
        else:
            self._compiled.move_to_end(key)
            self.hits += 1
        try:
            grammar = await asyncio.shield(task)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, grammar.start, output)
        except InvalidGrammar as error:
            raise InvalidRequest(f"the constraint on the output is invalid: {error}") from None

    def close(self) -> None:
        """Cancel compilations that have not started."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _drop_old(self, salt: bytes) -> None:
        own = [key for key in self._compiled if key[0] == salt]
        if len(own) > max(1, self._capacity // _MAX_OF_TENANT):
            del self._compiled[own[0]]
        if len(self._compiled) > self._capacity:
            self._compiled.popitem(last=False)

    async def _compile(self, spec: GrammarSpec) -> Grammar:
        if self._vocabulary is None or (
            self._vocabulary.done() and self._vocabulary.exception() is not None
        ):
            self._vocabulary = asyncio.create_task(self._load())
        vocabulary = await asyncio.shield(self._vocabulary)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._timed, spec, vocabulary)

    def _timed(self, spec: GrammarSpec, vocabulary: GrammarVocabulary) -> Grammar:
        begin = time.monotonic()
        try:
            return compile_grammar(spec, vocabulary, self._bounds)
        finally:
            self.compile_times.append(time.monotonic() - begin)

    async def _load(self) -> GrammarVocabulary:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read)

    def _read(self) -> GrammarVocabulary:
        """Read the tokenizer. Raises InvalidRequest if there is none."""
        try:
            tokenizer = load_tokenizer(self._model)
            return GrammarVocabulary(tokenizer.json, self._vocab_size, self._eos_ids)
        except (SettingsError, ValueError) as error:
            raise InvalidRequest(
                f"this worker cannot constrain output without a tokenizer: {error}"
            ) from error
