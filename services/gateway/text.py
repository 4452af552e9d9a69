"""From tokens to what a client reads: the text of each choice, cut where a stop string begins."""

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
class Piece:
    """What one choice gained. ``finish`` is set on its last piece."""

    choice: int
    text: str
    tokens: list[sampling_pb2.Token]
    finish: FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED


class StopStrings:
    """Passes text on until a stop string appears, and holds back what may become one.

    The match that is complete first wins, and of those the one that began first, so that the cut
    does not depend on how the text was divided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown, and whether a stop string was met."""
        if not self._stops:
            return text, False
        pending = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if matches:
            self._held = ""
            return pending[: min(matches)[1]], True
        keep = len(pending) - max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[keep:]
        return pending[:keep], False

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


class _Choice:
    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.detokenizer = IncrementalDetokenizer(tokenizer)
        self.stops = StopStrings(stops)
        self.finished = False


class TextAssembly:
    """The text of all choices of one request, built token by token."""

    def __init__(self, tokenizer: Tokenizer, choices: int, stops: Sequence[str]) -> None:
        self._choices = [_Choice(tokenizer, stops) for _ in range(choices)]
        self._unfinished = choices

    @property
    def done(self) -> bool:
        """Every choice has ended, for the client: a worker may still be running one."""
        return self._unfinished == 0

    def push(
        self,
        tokens: Iterable[sampling_pb2.Token],
        ended: Iterable[tuple[int, FinishReason]],
    ) -> list[Piece]:
        """What each choice gained by these tokens and ends; nothing after a stop string."""
        pieces: dict[int, Piece] = {}
        for token in tokens:
            choice = self._choices[token.choice]
            if choice.finished:
                continue
            text, stopped = choice.stops.push(choice.detokenizer.push((token.token,)))
            piece = pieces.get(token.choice)
            if piece is None:
                piece = pieces[token.choice] = Piece(token.choice, text, [token])
            else:
                piece.text += text
                piece.tokens.append(token)
            if stopped:
                self._finish(choice, piece, sampling_pb2.FINISH_REASON_STOP)
        for index, reason in ended:
            choice = self._choices[index]
            if choice.finished:
                continue
            piece = pieces.setdefault(index, Piece(index, "", []))
            text, stopped = choice.stops.push(choice.detokenizer.finish())
            piece.text += text if stopped else text + choice.stops.finish()
            self._finish(choice, piece, sampling_pb2.FINISH_REASON_STOP if stopped else reason)
        return list(pieces.values())

    def _finish(self, choice: _Choice, piece: Piece, reason: FinishReason) -> None:
        choice.finished = True
        piece.finish = reason
        self._unfinished -= 1
