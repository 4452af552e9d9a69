"""Masks of the constrained sequences of an engine."""

from collections.abc import Callable, Sequence

import numpy as np

from runtime.core.sequence import SequenceState
from runtime.grammar.masks import MaskWriter, TokenMasks
from runtime.grammar.matcher import Matcher

NO_MASKS = TokenMasks([], np.empty((0, 0), np.int32))


class Constraints:
    """Computes the masks of steps from the known tokens of their sequences.

    Sequences keep their matchers, which consume each output token once. The tokens of a preempted
    sequence do not change, so neither do those that its matcher has consumed.
    """

    def __init__(self) -> None:
        self._writer: MaskWriter | None = None

    def masks(
        self, sequences: Sequence[SequenceState], is_used: Callable[[SequenceState], bool]
    ) -> tuple[TokenMasks, list[tuple[SequenceState, str]]]:
        """Return the masks of a step, and the constrained sequences that have none, with reasons.

        Args:
            sequences: those of `StepPlan.sampled`, after the previous step was read.
            is_used: whether the token of a sequence is used. Others need no mask.
        """
        rows = [
            row
            for row, sequence in enumerate(sequences)
            if sequence.request.grammar is not None and is_used(sequence)
        ]
        if not rows:
            return NO_MASKS, []
        matchers = [_advanced(sequences[row]) for row in rows]
        if self._writer is None:
            self._writer = MaskWriter()
        words = self._writer.write(matchers, matchers[0].vocabulary.mask_words)
        failed = []
        for at, matcher in enumerate(matchers):
            reason = matcher.error or ("" if words[at].any() else "no token is allowed")
            if reason:
                failed.append((sequences[rows[at]], reason))
                words[at] = -1
        return TokenMasks(rows, words), failed


def _advanced(sequence: SequenceState) -> Matcher:
    """Return the matcher of a sequence after all of its output tokens."""
    request, matcher = sequence.request, sequence.matcher
    assert request.grammar is not None
    if matcher is None:
        matcher = sequence.matcher = request.grammar.copy()
    matcher.advance(sequence.tokens[request.prompt_tokens + matcher.consumed :])
    return matcher
