"""Masks of the tokens that grammars allow next."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from runtime.grammar.matcher import Matcher

_MAX_THREADS = 8

MaskWords = NDArray[np.int32]
"""Masks ``[m, words]``: bit ``i % 32`` of word ``i // 32`` is 1 if token ``i`` is allowed."""


@dataclass(frozen=True)
class TokenMasks:
    """Masks of some of the sequences for which a step samples tokens.

    Attributes:
        rows: index of each sequence in `StepPlan.sampled`.
        words: the mask of each of these sequences.
    """

    rows: list[int]
    words: MaskWords

    def by_row(self) -> dict[int, MaskWords]:
        """Return the mask of each sequence, `[words]`, by its index."""
        return dict(zip(self.rows, self.words, strict=True))


class MaskWriter:
    """Advances matchers and computes their masks in parallel, without the interpreter's lock."""

    def __init__(self, threads: int | None = None) -> None:
        self._executor = LLExecutor(threads or min(_MAX_THREADS, len(os.sched_getaffinity(0))))

    def advance(self, matchers: Sequence[Matcher], tokens: Sequence[Sequence[int]]) -> None:
        """Consume further output tokens of matchers; see `Matcher.advance`."""
        pairs = []
        for matcher, added in zip(matchers, tokens, strict=True):
            if len(added) == 1:
                pairs.append((matcher.inner, added[0]))
                matcher.consumed += 1
            else:
                matcher.advance(added)
        if pairs:
            self._executor.consume_token_par(pairs)

    def write(self, matchers: Sequence[Matcher], words: int) -> MaskWords:
        """Return the masks of matchers, each of ``words`` words.

        An error is in `Matcher.error` of the matcher, whose mask is then not valid.
        """
        masks = np.zeros((len(matchers), words), np.int32)
        if matchers:
            self._executor.unsafe_compute_mask_ptr(
                [(matcher.inner, row) for row, matcher in enumerate(matchers)],
                masks.ctypes.data,
                masks.itemsize * words,
                len(matchers),
            )
        return masks


def mask_of(tokens: Collection[int], words: int) -> MaskWords:
    """Return a mask `[words]` that allows only the given tokens."""
    bits = np.zeros(words * 32, np.uint8)
    bits[np.fromiter(tokens, np.int64, len(tokens))] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_tokens(mask: MaskWords, first: int, count: int) -> NDArray[np.bool_]:
    """Return for tokens ``first … first + count - 1`` whether masks allow them, bool `[…, count]`.

    Args:
        mask: masks `[…, words]`.
    """
    bits = np.unpackbits(mask.view(np.uint8), axis=-1, bitorder="little")
    return bits[..., first : first + count].view(np.bool_)
