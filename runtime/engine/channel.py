"""Steps of the first rank of a worker, sent to the other ranks (followers) in other processes.

The first rank writes each call of its executor into a ring in shared memory, and each follower
repeats the call on its own executor, in the same order. A launch or a read is sent before the first
rank executes it, because it may block in a collective until all ranks execute it. Plans are sent as
deltas, see `runtime.engine.plan_deltas`.

A message is its number, a `Call` and the arguments. Followers check that no number is missing, and
that events and sampled tokens equal those of the first rank.
"""

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from runtime.core.plan import StepPlan
from runtime.engine.executor import Executor, ExecutorShape, LaunchedStep
from runtime.engine.mask_words import mask_words, masks_of_words
from runtime.engine.plan_deltas import PlanDecoder, PlanEncoder
from runtime.engine.plan_fields import WordReader, add_items
from runtime.engine.ring import RingReader, RingSize, RingWriter
from runtime.engine.shared import SharedWords, Words
from runtime.errors import FirstRankEnded, RanksDisagree, RankTimeout
from runtime.grammar.masks import TokenMasks
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import silent

BEAT_S = 0.1
"""Seconds between two beats of a follower."""
_EXECUTED, _BEAT, _BUSY = range(3)
"""Words of a follower's progress: executed messages, time of its last beat, and time since which it
is busy, 0 if it is not. Times are those of `time.monotonic_ns`, which are equal in all processes of
a host."""
_PROGRESS = 3
_NOT_FINITE = -2
"""Token of a draw without finite logits."""


class Call(IntEnum):
    """A method of an executor or of `LaunchedStep`. `TOKENS` is the result of the last `READ`."""

    START = 0
    WARM_UP = 1
    LAUNCH = 2
    READ = 3
    TOKENS = 4
    COPY_PAGES = 5
    RECORD_EVENT = 6
    CLOSE = 7
    SAMPLE = 8


@dataclass(frozen=True)
class RankProgress:
    """Progress of a follower.

    Attributes:
        rank: number of the rank, from 1.
        executed: number of messages that it has executed.
        busy_s: seconds since it took the message that it executes or, if it is older, since it took
            the oldest launch that was not read: its device may compute that step, or wait in one of
            its collectives. 0 if there is none.
        silent_s: seconds since its last beat, or since the channel was created if it has not
            started. It is much longer than `BEAT_S` if the process is stopped or dead, or if a
            call holds the interpreter's lock.
    """

    rank: int
    executed: int
    busy_s: float
    silent_s: float


@dataclass(frozen=True)
class UnreadStep:
    """A launched step of a follower.

    Attributes:
        since: `time.monotonic_ns` at its launch.
    """

    step: LaunchedStep
    since: int


@dataclass(frozen=True)
class StepReader:
    """The end of a follower. It can be passed to a process that is spawned; see `follow`.

    Attributes:
        rank: number of the rank, from 1.
    """

    rank: int
    messages: RingReader
    progress: SharedWords

    @property
    def _row(self) -> Words:
        return self.progress.words[_PROGRESS * (self.rank - 1) :][:_PROGRESS]

    @property
    def busy_s(self) -> float:
        """See `RankProgress`."""
        since = int(self._row[_BUSY])
        return (time.monotonic_ns() - since) / 1e9 if since else 0.0

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Write a beat every `BEAT_S` from a thread."""
        row, ended = self._row, threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_S):
                row[_BEAT] = time.monotonic_ns()

        thread = threading.Thread(target=beat, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @contextmanager
    def executing(self, unread: Mapping[int, UnreadStep]) -> Iterator[None]:
        """Publish that a message is executed, and that it was if there is no error.

        Args:
            unread: steps that were launched and not read, oldest first.
        """
        row = self._row
        row[_BUSY] = row[_BUSY] or time.monotonic_ns()
        yield
        row[_EXECUTED] += 1
        row[_BUSY] = next((step.since for step in unread.values()), 0)


class StepChannel:
    """The end of the first rank. One thread calls the methods that send: `start` first, once.

    Args:
        followers: number of other ranks.
        timeout_s: maximum time in seconds to wait for a follower that is a whole ring behind.
        size: size of the ring.

    Attributes:
        readers: the end of each follower, to pass to its process.
        sent: number of messages that were sent.

    Raises:
        RankTimeout: by all methods that send; see `RingWriter.write`.
    """

    def __init__(self, followers: int, *, timeout_s: float, size: RingSize | None = None) -> None:
        self._ring = RingWriter(followers, timeout_s=timeout_s, size=size or RingSize())
        self._progress = SharedWords.of(_PROGRESS * followers)
        self._progress.words[_BEAT::_PROGRESS] = time.monotonic_ns()
        self.readers = tuple(
            StepReader(rank, reader, self._progress)
            for rank, reader in enumerate(self._ring.readers, 1)
        )
        self.sent = 0

    def start(self, shape: ExecutorShape) -> None:
        """Send the sizes of the first rank, which followers compare with their own."""
        self._encoder = PlanEncoder(shape.plan)
        self._send(Call.START, [_digest(shape)])

    def warm_up(self) -> None:
        """Send `Executor.warm_up`."""
        self._send(Call.WARM_UP, [])

    def launch(self, plan: StepPlan) -> int:
        """Send `Executor.launch` and return the number of the step."""
        return self._send(Call.LAUNCH, self._encoder.encode(plan))

    def sample(self, step: int, masks: TokenMasks) -> None:
        """Send `LaunchedStep.sample`.

        Args:
            step: result of `launch`.
        """
        self._send(Call.SAMPLE, mask_words(step, masks))

    def read(self, step: int, ready: int) -> None:
        """Send `LaunchedStep.read`.

        Args:
            step: result of `launch`.
            ready: see `LaunchedStep`.
        """
        self._send(Call.READ, [step, ready])

    def tokens(self, draws: Sequence[Draw | None]) -> None:
        """Send the draws that the first rank has read. Followers compare their tokens with them."""
        self._send(Call.TOKENS, [*map(_token, draws)])

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Send `Executor.copy_pages`."""
        words = [group]
        add_items(words, sources)
        add_items(words, targets)
        self._send(Call.COPY_PAGES, words)

    def record_event(self, number: int) -> None:
        """Send `Executor.record_event`, with the number that the first rank has returned."""
        self._send(Call.RECORD_EVENT, [number])

    def close(self) -> None:
        """End the followers, after the messages that were sent. Idempotent.

        A follower that is a whole ring behind, for example because it is dead, is not waited for.
        """
        if not self._ring.closed:
            with suppress(RankTimeout):
                self._send(Call.CLOSE, [], timeout_s=0)
            self._ring.close()

    def ranks(self) -> list[RankProgress]:
        """Return the progress of each follower. Any thread may call it."""
        rows = self._progress.words.reshape(-1, _PROGRESS).tolist()
        now = time.monotonic_ns()
        return [
            RankProgress(rank, executed, (now - busy) / 1e9 if busy else 0.0, (now - beat) / 1e9)
            for rank, (executed, beat, busy) in enumerate(rows, 1)
        ]

    def _send(self, call: Call, words: list[int] | Words, timeout_s: float | None = None) -> int:
        """Send a message and return its number.

        Args:
            timeout_s: see `RingWriter.write`.
        """
        number = self.sent
        self._ring.write(np.concatenate([(number, call), words]).astype(np.int64), timeout_s)
        self.sent += 1
        return number


class Follower:
    """Executes the messages of a `StepChannel` on an executor.

    Attributes:
        executed: number of executed messages.
        unread: launched steps that were not read, by number, oldest first.
        plans: decodes plans.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.plans = PlanDecoder()
        self.unread: dict[int, UnreadStep] = {}
        self.executed = 0
        self._read_step = 0
        self._tokens: list[int] = []

    def execute(self, message: Words) -> bool:
        """Execute a message. Return whether more follow.

        Raises:
            RanksDisagree: a message is missing, or this rank has another shape, event or token than
                the first one.
        """
        if message[1] == Call.SAMPLE:
            return self._sample(message)
        reader = WordReader(message.tolist())
        _check("message", reader.word(), self.executed)
        executor = self._executor
        match call := Call(reader.word()):
            case Call.START:
                _check("sizes, as a hash", reader.word(), _digest(executor.shape))
            case Call.WARM_UP:
                executor.warm_up(silent)
            case Call.LAUNCH:
                plan, since = self.plans.decode(reader), time.monotonic_ns()
                self.unread[self.executed] = UnreadStep(executor.launch(plan), since)
            case Call.READ:
                self._read(*reader.take(2))
            case Call.TOKENS:
                _check(f"tokens of step {self._read_step}", reader.rest(), self._tokens)
            case Call.COPY_PAGES:
                executor.copy_pages(reader.word(), reader.items(), reader.items())
            case Call.RECORD_EVENT:
                _check("event", reader.word(), executor.record_event())
        self.executed += 1
        return call is not Call.CLOSE

    def _sample(self, message: Words) -> bool:
        """Execute a message with masks, which are too large for lists."""
        _check("message", int(message[0]), self.executed)
        number, masks = masks_of_words(message[2:])
        self.unread[number].step.sample(masks)
        self.executed += 1
        return True

    def _read(self, number: int, ready: int) -> None:
        step = self.unread[number].step
        _check(f"event of step {number}", ready, step.ready)
        self._read_step, self._tokens = number, [_token(draw) for draw in step.read()]
        del self.unread[number]


def follow(executor: Executor, reader: StepReader) -> None:
    """Repeat the calls of the first rank on a follower's executor until the channel is closed.

    The caller writes the beats of the follower; see `StepReader.beating`.

    Raises:
        FirstRankEnded: the process of the first rank ended without closing the channel.
        RanksDisagree: see `Follower.execute`.
    """
    follower = Follower(executor)
    more = True
    while more:
        message = reader.messages.read()
        if message is None:
            raise FirstRankEnded(f"the first rank ended after {follower.executed} messages")
        with reader.executing(follower.unread):
            more = follower.execute(message)


def _check(what: str, first: object, own: object) -> None:
    if first != own:
        raise RanksDisagree(f"{what}: {first} on the first rank, {own} on this one")


def _token(draw: Draw | None) -> int:
    return _NOT_FINITE if draw is None else draw.token


def _digest(shape: ExecutorShape) -> int:
    """Return a hash of the sizes that are equal on all ranks."""
    text = repr((shape.plan, shape.options))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
