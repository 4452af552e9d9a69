"""State shared by both interfaces: tokenizer, slots, log and event times."""

import asyncio
import itertools
import math
import re
import time
import zlib
from collections import deque
from collections.abc import Sequence

from tests.loadgen.synthetic import Behaviour, Truth

HASHED = 1 << 31
"""Smallest id of words that do not have the form wN."""
_NUMBERED = re.compile(r"w(0|[1-9][0-9]{0,8})")


class Tokenizer:
    """Word tokenizer.

    The id of a word wN, such as w12, is the number N. The id of any other word is a hash, which can
    be decoded only after `encode` has returned it.
    """

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids.

        Raises:
            KeyError: if an id belongs to no known word.
        """
        return " ".join(f"w{id}" if 0 <= id < 10**9 else self._seen[id] for id in ids)

    def _id(self, word: str) -> int:
        if _NUMBERED.fullmatch(word):
            return int(word[1:])
        id = HASHED | zlib.crc32(word.encode())
        if self._seen.setdefault(id, word) != word:
            raise KeyError(f"{word} and {self._seen[id]} have the same hash")
        return id


class PrefixCache:
    """Prefixes of earlier prompts with their answers, in whole blocks."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._known: set[tuple[int, ...]] = set()

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Add a prompt and its answer, and return the number of cached tokens of the prompt.

        The last token of a prompt is never cached, as its logits are needed.
        """
        cached, step = 0, self._block
        while cached + step < len(prompt) and tuple(prompt[: cached + step]) in self._known:
            cached += step
        whole = (*prompt, *answer)
        self._known |= {whole[:end] for end in range(step, len(whole) + 1, step)}
        return cached


class Slots:
    """Slots with a first-come, first-served queue."""

    def __init__(self, count: int | None) -> None:
        self._free = math.inf if count is None else count
        self._waiting: deque[asyncio.Future[float]] = deque()

    async def take(self, read: float) -> float:
        """Wait for a slot and return the start time of a request read at ``read``."""
        if self._free > 0:
            self._free -= 1
            return read
        waiter: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return max(read, await waiter)
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(waiter.result())
            raise

    def give(self, at: float) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(at)
                return
        self._free += 1


class Schedule:
    """Slots, request log and scheduled event times of one server."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.slots = Slots(behaviour.concurrency)
        self.tokenizer = Tokenizer()
        self.log: list[Truth] = []
        self._outcomes = itertools.cycle(behaviour.outcomes)
        block = behaviour.prefix_cache
        self._cache = None if block is None else PrefixCache(block)

    def arrive(self, read: float, id: str, prompt: Sequence[int], max_tokens: int) -> Truth:
        number = len(self.log)
        id = id or f"cmpl-{number}"
        truth = Truth(number, id, next(self._outcomes), read, len(prompt), max_tokens)
        if self._cache is not None:
            truth.cached_tokens = self._cache.add(prompt, range(max_tokens))
        self.log.append(truth)
        return truth

    def clear(self, at: float) -> float:
        """Return ``at``, or the end of the stall if ``at`` is within the stall."""
        if self.behaviour.stall_s and self.log:
            begin, end = (self.log[0].read + offset for offset in self.behaviour.stall_s)
            return end if begin <= at < end else at
        return at

    def due(self, truth: Truth, event: int) -> float:
        """Return the time at which an event of a request that has a slot is due."""
        assert truth.started is not None
        computed = truth.prompt_tokens - (truth.cached_tokens or 0)
        first = truth.started + self.behaviour.ttft_s + computed * self.behaviour.prefill_s
        return self.clear(first + event * self.behaviour.itl_s)

    async def sleep(self, until: float) -> None:
        """Sleep until a time. If the stall is in progress then, sleep until its end."""
        await asyncio.sleep(until - time.monotonic())
        now = time.monotonic()
        if (end := self.clear(now)) > now:
            await asyncio.sleep(end - now)

    def spans(self, max_tokens: int) -> list[range]:
        """Return the token range of each event."""
        step = self.behaviour.tokens_per_event
        return [range(i, min(i + step, max_tokens)) for i in range(0, max_tokens, step)]


class Slot:
    """Slot of a request, released at the due time of its last event."""

    def __init__(self, server: Schedule, truth: Truth) -> None:
        self._server = server
        self._truth = truth
        self._until = 0.0

    async def __aenter__(self) -> "Slot":
        self._until = await self._server.slots.take(self._truth.read)
        self._truth.started = self._until
        return self

    async def until(self, event: int) -> None:
        self._until = self._server.due(self._truth, event)
        await self._server.sleep(self._until)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        left = kind is not None and issubclass(kind, asyncio.CancelledError)
        self._server.slots.give(time.monotonic() if left else self._until)


def text_of(tokens: range) -> str:
    return "".join(f" w{token}" for token in tokens)
