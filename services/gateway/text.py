"""Detokenization of each choice, cut at the first stop string or stop token."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.v1 import sampling_pb2
from services.tokenizer.tokenizer import IncrementalDetokenizer, Tokenizer

FinishReason: TypeAlias = "sampling_pb2.FinishReason.ValueType"

FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True)
class TextDelta:
    """New output of one choice. ``finish`` is set on its last delta.

    Attributes:
        offsets: position of each token in the text of the choice, in characters. The offset of a
            token that continues a character is that of the character. The offset of a token without
            visible text is the length of the text before it. The offset of tokens of a stop string
            that the text does not include is the length of the text.
        scored: log probabilities of the next prompt tokens, which all choices of a request share.
        cached_tokens: number to add to the cached prompt tokens of the request. It is negative if a
            later attempt computes tokens that an earlier one did not.
        stop_string: stop string that ended the output; None if none did, or before the last delta.
    """

    choice: int
    text: str = ""
    tokens: list[sampling_pb2.Token] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED
    cached_tokens: int = 0
    scored: Sequence[sampling_pb2.PromptLogprobs] = ()
    stop_string: str | None = None


@dataclass(frozen=True)
class Stops:
    """Strings and tokens that end a text, besides end-of-sequence tokens.

    Attributes:
        strings: stop strings.
        tokens: token ids that end the output on the worker.
        min_tokens: number of output tokens at the start of each choice in whose text no stop string
            counts. Workers sample no stop token among them.
        included: whether the text includes the stop string or the text of the stop token.
    """

    strings: Sequence[str] = ()
    tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    included: bool = False


class StopStringFilter:
    """Cuts a text at the first stop string; buffers text that may be the start of one.

    The match that ends first wins. If several end there, the one that starts first wins. The result
    does not depend on how the text is split between calls.

    Args:
        included: whether the text is cut after the stop string instead of before it.

    Attributes:
        found: stop string at which the text was cut, if any.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        self.found: str | None = None
        self._stops = stops
        self._included = included
        self._buffer = ""

    def push(self, text: str, *, stops: bool = True) -> tuple[str, bool]:
        """Return the text that cannot belong to a stop string, and whether one was found.

        Args:
            stops: whether a stop string that ends in ``text`` counts.
        """
        if not self._stops:
            return text, False
        old = len(self._buffer)
        pending = self._buffer + text
        matches = [
            (at + len(stop), at, stop)
            for stop in self._stops
            # A stop string that ends in the buffer did not count.
            if stops and (at := pending.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if matches:
            self._buffer = ""
            end, start, self.found = min(matches)
            return pending[: end if self._included else start], True
        keep = len(pending) - max(overlap(pending, stop) for stop in self._stops)
        self._buffer = pending[keep:]
        return pending[:keep], False

    def finish(self) -> str:
        """Return the buffered text at the end of the output."""
        text, self._buffer = self._buffer, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


class _Choice:
    """Output of one choice.

    Tokens are returned together with the start of their text: a token whose text may belong to a
    stop string is held, because its offset is not known yet.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Stops, shown: Collection[str]) -> None:
        # UNSPECIFIED until the choice is complete.
        self.reason: FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown=shown)
        self._stops = StopStringFilter(stops.strings, included=stops.included)
        self._holds = bool(stops.strings)
        self._min_tokens = stops.min_tokens
        self._hidden = frozenset() if stops.included else stops.tokens
        # Numbers of characters.
        self._decoded = self._returned = 0
        self._held: deque[tuple[int, sampling_pb2.Token]] = deque()

    def push(self, token: sampling_pb2.Token, delta: TextDelta) -> bool:
        """Append new output to ``delta``. Return whether a stop string was found."""
        start = self._decoded
        text = "" if token.token in self._hidden else self._detokenizer.push((token.token,))
        if self._holds:
            self._held.append((start, token))
            return self._append(text, delta, stops=token.index >= self._min_tokens)
        self._decoded = start + len(text)
        delta.text += text
        delta.tokens.append(token)
        delta.offsets.append(start)
        return False

    def finish(self, delta: TextDelta, reason: FinishReason) -> None:
        """Append the rest of the output to ``delta``, and set the finish reason."""
        if self._append(self._detokenizer.finish(), delta):
            reason = sampling_pb2.FINISH_REASON_STOP
        else:
            self._return(self._stops.finish(), delta)
        self.end(delta, reason)

    def end(self, delta: TextDelta, reason: FinishReason) -> None:
        """Append the held tokens to ``delta``, and set the finish reason."""
        while self._held:
            self._release(delta)
        self.reason = delta.finish = reason
        delta.stop_string = self._stops.found

    def _append(self, text: str, delta: TextDelta, *, stops: bool = True) -> bool:
        self._decoded += len(text)
        text, stopped = self._stops.push(text, stops=stops)
        self._return(text, delta)
        return stopped

    def _return(self, text: str, delta: TextDelta) -> None:
        delta.text += text
        self._returned += len(text)
        while self._held and (self._held[0][0] < self._returned or self._returned == self._decoded):
            self._release(delta)

    def _release(self, delta: TextDelta) -> None:
        start, token = self._held.popleft()
        delta.tokens.append(token)
        delta.offsets.append(min(start, self._returned))


class TextAssembler:
    """Detokenizes all choices of one request incrementally.

    Args:
        shown: names of special tokens that the text includes; others have no text.
        discards: whether the output is dropped, because the client wants none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        choices: int,
        stops: Stops,
        shown: Collection[str] = (),
        *,
        discards: bool = False,
    ) -> None:
        self._discards = discards
        self._choices = [_Choice(tokenizer, stops, shown) for _ in range(choices)]
        self._unfinished = choices

    @property
    def done(self) -> bool:
        """Whether every choice is complete. The worker may still send tokens; they are dropped."""
        return self._unfinished == 0

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reason of each choice that is complete, in OpenAI's names."""
        return [FINISH_REASONS[choice.reason] for choice in self._choices if choice.reason]

    def push(
        self,
        tokens: Iterable[sampling_pb2.Token],
        ended: Iterable[tuple[int, FinishReason]],
    ) -> list[TextDelta]:
        """Return the new output of each choice; output after a stop string is dropped.

        A choice has no delta if all of its new output may belong to a stop string.

        Args:
            tokens: new tokens, in order.
            ended: index and finish reason of the choices that end after these tokens.
        """
        deltas: dict[int, TextDelta] = {}
        for token in tokens:
            choice = self._choices[token.choice]
            if choice.reason:
                continue
            delta = deltas.get(token.choice)
            if delta is None:
                delta = deltas[token.choice] = TextDelta(token.choice)
            if choice.push(token, delta):
                choice.end(delta, sampling_pb2.FINISH_REASON_STOP)
                self._unfinished -= 1
        for index, reason in ended:
            choice = self._choices[index]
            if choice.reason:
                continue
            choice.finish(deltas.setdefault(index, TextDelta(index)), reason)
            self._unfinished -= 1
        if self._discards:
            ends = [index for index, delta in deltas.items() if delta.finish]
            return [TextDelta(index, finish=sampling_pb2.FINISH_REASON_LENGTH) for index in ends]
        return [delta for delta in deltas.values() if delta.tokens or delta.text or delta.finish]
