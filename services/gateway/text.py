"""Detokenization of each choice, cut at the first stop string."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.v1 import sampling_pb2
from services.common.tokenizer import IncrementalDetokenizer, Tokenizer

FinishReason: TypeAlias = "sampling_pb2.FinishReason.ValueType"

FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True)
class TextDelta:
    """New output of one choice. ``finish`` is set on its last delta."""

    choice: int
    text: str
    tokens: list[sampling_pb2.Token]
    finish: FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED


class StopStringFilter:
    """Cuts a text at the first stop string; buffers text that may be the start of one.

    The match that ends first wins. If several end there, the one that starts first wins. The result
    does not depend on how the text is split between calls.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._buffer = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that cannot belong to a stop string, and whether one was found."""
        if not self._stops:
            return text, False
        pending = self._buffer + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if matches:
            self._buffer = ""
            return pending[: min(matches)[1]], True
        keep = len(pending) - max(_overlap(pending, stop) for stop in self._stops)
        self._buffer = pending[keep:]
        return pending[:keep], False

    def finish(self) -> str:
        """Return the buffered text at the end of the output."""
        text, self._buffer = self._buffer, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


class _Choice:
    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.detokenizer = IncrementalDetokenizer(tokenizer)
        self.stops = StopStringFilter(stops)
        self.finished = False
        self.reason: FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED


class TextAssembler:
    """Detokenizes all choices of one request incrementally."""

    def __init__(self, tokenizer: Tokenizer, choices: int, stops: Sequence[str]) -> None:
        self._choices = [_Choice(tokenizer, stops) for _ in range(choices)]
        self._unfinished = choices

    @property
    def done(self) -> bool:
        """Whether every choice is complete. The worker may still send tokens; they are dropped."""
        return self._unfinished == 0

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reason of each choice that is complete, in OpenAI's names."""
        return [FINISH_REASONS[choice.reason] for choice in self._choices if choice.finished]

    def push(
        self,
        tokens: Iterable[sampling_pb2.Token],
        ended: Iterable[tuple[int, FinishReason]],
    ) -> list[TextDelta]:
        """Return the new output of each choice; output after a stop string is dropped.

        Args:
            tokens: new tokens, in order.
            ended: index and finish reason of the choices that end after these tokens.
        """
        deltas: dict[int, TextDelta] = {}
        for token in tokens:
            choice = self._choices[token.choice]
            if choice.finished:
                continue
            text, stopped = choice.stops.push(choice.detokenizer.push((token.token,)))
            delta = deltas.get(token.choice)
            if delta is None:
                delta = deltas[token.choice] = TextDelta(token.choice, text, [token])
            else:
                delta.text += text
                delta.tokens.append(token)
            if stopped:
                self._finish(choice, delta, sampling_pb2.FINISH_REASON_STOP)
        for index, reason in ended:
            choice = self._choices[index]
            if choice.finished:
                continue
            delta = deltas.setdefault(index, TextDelta(index, "", []))
            text, stopped = choice.stops.push(choice.detokenizer.finish())
            delta.text += text if stopped else text + choice.stops.finish()
            self._finish(choice, delta, sampling_pb2.FINISH_REASON_STOP if stopped else reason)
        return list(deltas.values())

    def _finish(self, choice: _Choice, delta: TextDelta, reason: FinishReason) -> None:
        choice.finished = True
        choice.reason = delta.finish = reason
        self._unfinished -= 1
