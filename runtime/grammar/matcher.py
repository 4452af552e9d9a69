"""The state of a grammar after the output tokens of a choice."""

from collections.abc import Sequence
from typing import Self

from llguidance import LLMatcher

from runtime.grammar.vocabulary import GrammarVocabulary

_MAX_ERROR_CHARS = 300


class Matcher:
    """State of a grammar. It is a function of the output tokens alone.

    One thread at a time may use it.

    Attributes:
        vocabulary: the tokens of the grammar.
        consumed: number of output tokens that led to this state.
    """

    def __init__(self, inner: LLMatcher, vocabulary: GrammarVocabulary, consumed: int = 0) -> None:
        self.inner = inner
        self.vocabulary = vocabulary
        self.consumed = consumed

    @property
    def error(self) -> str:
        """Reason for which the state is invalid, or an empty string.

        A token was not allowed, or a mask took more work than llguidance's limits allow.
        """
        if not self.inner.is_error():
            return ""
        reason = self.inner.get_error().removesuffix("\n<non-verbose/>")
        return " ".join(reason.split())[:_MAX_ERROR_CHARS]

    def copy(self) -> Self:
        """Return an independent copy, in about 5 µs."""
        return type(self)(self.inner.deep_copy(), self.vocabulary, self.consumed)

    def advance(self, tokens: Sequence[int]) -> None:
        """Consume further output tokens. Errors are in `error`."""
        if tokens:
            self.inner.consume_tokens(list(tokens))
            self.consumed += len(tokens)
