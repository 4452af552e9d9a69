"""Masks of the constrained sequences of an engine."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from runtime.core.sequence import SequenceState
from runtime.grammar.masks import MaskWords, MaskWriter, TokenMasks, mask_of
from runtime.grammar.matcher import Matcher

NO_MASKS = TokenMasks([], np.empty((0, 0), np.int32))
_KEPT_MASKS = 256
"""Number of sets of token ids whose masks are kept."""


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
        constrained = [sequences[row] for row in rows]
        matchers = [_matcher_of(sequence) for sequence in constrained]
        if self._writer is None:
            self._writer = MaskWriter()
        self._writer.advance(
            matchers,
            [
                sequence.tokens[sequence.request.prompt_tokens + matcher.consumed :]
                for sequence, matcher in zip(constrained, matchers, strict=True)
            ],
        )
        words = self._writer.write(matchers, matchers[0].vocabulary.mask_words)
        failed = []
        allowed = np.count_nonzero(words, axis=1).tolist()
        for at, matcher in enumerate(matchers):
            reason = matcher.error or ("" if allowed[at] else "no token is allowed")
            reason = reason or _conflict(constrained[at], words[at])
            if reason:
                failed.append((constrained[at], reason))
                words[at] = -1
        return TokenMasks(rows, words), failed


def _conflict(sequence: SequenceState, mask: MaskWords) -> str:
    """Return why no token of a mask can be sampled, or an empty string.

    ``allowed_token_ids`` and ``bad_words`` exclude tokens that the mask allows. If the text is
    complete and cannot continue, an end token is sampled even so, as before ``min_tokens``.
    """
    request, sampling = sequence.request, sequence.request.sampling
    if not sampling.allowed_token_ids and not sampling.bad_words:
        return ""
    left = mask
    if sampling.allowed_token_ids:
        left = left & _mask_of(sampling.allowed_token_ids, len(mask))
    if excluded := sampling.excluded_by_bad_words(sequence.tokens[request.prompt_tokens :]):
        left = left & ~mask_of(excluded, len(mask))
    if left.any():
        return ""
    assert request.grammar is not None
    ends = _mask_of(frozenset(request.grammar.vocabulary.eos_ids), len(mask))
    if not (mask & ~ends).any():
        return ""
    return "allowed_token_ids or bad_words exclude all tokens that it allows"


_mask_of = lru_cache(_KEPT_MASKS)(mask_of)


def _matcher_of(sequence: SequenceState) -> Matcher:
    """Return the matcher of a sequence, which is created at first use."""
    if sequence.matcher is None:
        assert sequence.request.grammar is not None
        sequence.matcher = sequence.request.grammar.copy()
    return sequence.matcher
