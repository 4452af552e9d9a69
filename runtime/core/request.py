"""Requests, sampling parameters and sampled tokens: plain values without tensor code.

A request is one prompt with one or more choices (sequences generated from it). The output index of
a token is its position among the output tokens of its choice, from 0. After a failover, the output
tokens that another worker generated are counted as well.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain

import numpy as np

from runtime.config import ModelConfig
from runtime.errors import InvalidRequest
from runtime.grammar.matcher import Matcher
from runtime.pages.prefix import PageHasher, PageHashes

MAX_LOGPROBS = 20
"""Maximum alternatives reported for each token, as in OpenAI's API."""
MAX_BAD_WORDS = 128
"""Maximum bad words of a request, as sequences of tokens."""
MAX_BAD_WORD_TOKENS = 16
"""Maximum tokens of a bad word."""


def max_logprobs(vocab_size: int) -> int:
    """Return the maximum of ``SamplingParams.logprobs`` for a vocabulary of this size."""
    return min(vocab_size, MAX_LOGPROBS)


class FinishReason(Enum):
    """Reason a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request.

    ``logit_bias``, penalties, ``suppressed``, ``allowed_token_ids``, ``bad_words`` and the mask of
    a grammar are applied first. If ``temperature`` is 0, the token with the largest logit is then
    selected. Otherwise ``temperature``, ``min_p``, ``top_k`` and ``top_p`` are applied in this
    order, and a token is drawn at random. The random number depends only on ``seed``, the choice
    and the output index.

    Attributes:
        temperature: 0 for greedy decoding.
        top_k: number of most probable tokens to draw from; 0 for no limit.
        logit_bias: value to add to the logit of each token id.
        logprobs: number of most probable tokens to report beside the sampled one, or None for no
            log probabilities. Log probabilities are computed from the model's logits, without bias,
            penalties or temperature.
        min_tokens: output index before which the tokens in ``suppressed`` are not sampled.
        suppressed: token ids, usually of the tokens that end a choice.
        allowed_token_ids: the only token ids that may be sampled; empty for all.
        bad_words: sequences of token ids that the output does not contain: the last token of a
            sequence is not sampled if the output ends with its other tokens.
        prompt_logprobs: number of most probable tokens to report beside each prompt token, or None
            for no log probabilities of the prompt. All tokens of such a prompt are computed: KV in
            cached pages is not used.
        constrained: whether a grammar allows only some tokens, see `Request.grammar`. If it allows
            suppressed tokens only, one of them is sampled.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    min_tokens: int = 0
    suppressed: frozenset[int] = frozenset()
    allowed_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    constrained: bool = False

    @property
    def processes_logits(self) -> bool:
        """Whether a bias, a penalty or excluded tokens change the logits of any token."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or (self.min_tokens and self.suppressed)
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    def excluded_by_bad_words(self, output: Sequence[int]) -> list[int]:
        """Return the tokens with which a bad word would be complete after ``output``."""
        return [
            last
            for *before, last in self.bad_words
            if list(output[len(output) - len(before) :]) == before
        ]

    @property
    def filters(self) -> tuple[float, float, float]:
        """Temperature (1 in place of 0, because logits are divided by it), min-p and top-p."""
        return self.temperature or 1.0, self.min_p, self.top_p

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence penalty."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if a field is out of bounds."""
        bounds = {
            "temperature": (self.temperature, 0.0, 1e6),
            "min_p": (self.min_p, 0.0, 1.0),
            "presence_penalty": (self.presence_penalty, -1e3, 1e3),
            "frequency_penalty": (self.frequency_penalty, -1e3, 1e3),
            "top_k": (self.top_k, 0, 2**31),
            "logprobs": (self.logprobs or 0, 0, max_logprobs(vocab_size)),
            "prompt_logprobs": (self.prompt_logprobs or 0, 0, max_logprobs(vocab_size)),
            "min_tokens": (self.min_tokens, 0, 2**31),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:  # a NaN is refused, too
                raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0.0 < self.repetition_penalty <= 1e3:
            raise InvalidRequest(
                f"repetition_penalty must be above 0 and at most 1000, "
                f"not {self.repetition_penalty}"
            )
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"logit_bias token {token} is outside the vocabulary of {vocab_size}"
                )
            if not math.isfinite(bias):
                raise InvalidRequest(f"logit_bias of token {token} must be finite, not {bias}")
        self._validate_exclusions(vocab_size)

    def _validate_exclusions(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if tokens are invalid, or if no token may be left to sample."""
        bad = self.bad_words
        if len(bad) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words must be at most {MAX_BAD_WORDS}, not {len(bad)}")
        if not all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in bad):
            raise InvalidRequest(f"a bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens")
        for name, tokens in (
            ("suppressed tokens", self.suppressed),
            ("allowed_token_ids", self.allowed_token_ids),
            ("tokens of bad_words", {token for word in bad for token in word}),
        ):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise InvalidRequest(f"{name} must be between 0 and {vocab_size - 1}")
        excluded = {word[-1] for word in bad}
        if self.min_tokens:
            excluded |= self.suppressed
        if self.allowed_token_ids:
            empty = self.allowed_token_ids <= excluded
        else:
            empty = len(excluded | self.suppressed) >= vocab_size
        if empty:
            raise InvalidRequest(
                "min_tokens, bad_words and allowed_token_ids together may exclude all tokens"
            )


@dataclass(frozen=True)
class Request:
    """One prompt and the parameters of its generation.

    Attributes:
        tokens: token ids of the prompt. After a failover, the output tokens that the client has
            already received are appended.
        prompt_tokens: number of prompt tokens in ``tokens``.
        max_tokens: maximum output tokens of each choice, including those already delivered.
        stop_token_ids: tokens that end a choice; the stop token itself is part of the output.
        choices: number of sequences to generate (``n`` in OpenAI's API).
        salt: only requests with the same salt reuse the KV of one another.
        grammar: state of the grammar that constrains each choice, after the output tokens in
            ``tokens``; None if ``sampling.constrained`` is false. It is not changed.
    """

    id: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    choices: int = 1
    salt: bytes = b""
    grammar: Matcher | None = None

    @cached_property
    def packed(self) -> "array[int]":
        """``tokens`` as ``uint32[n]``. Raises OverflowError for ids that do not fit."""
        return array("I", self.tokens)

    def page_hashes(self, hasher: PageHasher) -> PageHashes:
        """Return the hashes of the full pages of ``tokens``.

        All calls with the same hasher return the same object, so that each hash is computed once,
        by the first one that looks for cached pages.
        """
        found = self._page_hashes.get(hasher)
        if found is None:
            hashes = hasher.hashes(self.packed, self.salt)
            found = self._page_hashes.setdefault(hasher, hashes)
        return found

    @cached_property
    def _page_hashes(self) -> dict[PageHasher, PageHashes]:
        return {}

    def limit(self, context_length: int) -> int:
        """Return the maximum number of tokens of a choice, including the prompt."""
        return min(self.prompt_tokens + self.max_tokens, context_length)

    def finish_reason(self, token: int, length: int, limit: int) -> FinishReason | None:
        """Return why a choice ends with ``token``, or None if it continues.

        Args:
            length: number of tokens of the choice up to this one, including the prompt.
            limit: maximum of ``length``; see `limit`.
        """
        if token in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= limit else None

    def validate(self, config: ModelConfig) -> None:
        """Raise `InvalidRequest` if the request is invalid for a model."""
        if not 1 <= self.prompt_tokens <= len(self.tokens):
            raise InvalidRequest(
                f"prompt_tokens must be between 1 and {len(self.tokens)}, not {self.prompt_tokens}"
            )
        if len(self.tokens) >= config.context_length:
            raise InvalidRequest(
                f"{len(self.tokens)} tokens leave no space for output in a "
                f"context of {config.context_length}"
            )
        try:
            largest = np.asarray(self.packed).max()
        except OverflowError:
            largest = config.vocab_size
        if largest >= config.vocab_size:
            raise InvalidRequest(f"token ids must be between 0 and {config.vocab_size - 1}")
        if self.choices < 1:
            raise InvalidRequest(f"choices must be at least 1, not {self.choices}")
        replayed = len(self.tokens) - self.prompt_tokens
        if self.max_tokens <= replayed:
            raise InvalidRequest(f"max_tokens must be above {replayed}, not {self.max_tokens}")
        self.sampling.validate(config.vocab_size)
        if self.sampling.constrained != (self.grammar is not None):
            raise InvalidRequest("a constrained request needs a grammar, and others must have none")
        if self.grammar is not None and self.grammar.vocabulary.size != config.vocab_size:
            raise InvalidRequest("the grammar is for another vocabulary")


@dataclass(frozen=True)
class SampledToken:
    """One output token.

    Attributes:
        choice: index of the choice, from 0.
        index: output index, that is, position among the choice's output tokens, from 0.
        token: token id.
        logprob: natural logarithm of the token's probability under the unprocessed logits; None
            if not requested.
        top: the most probable tokens with their log probabilities, in descending order; empty if
            not requested.
    """

    choice: int
    index: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens, given the tokens before each.

    The first token of a prompt has none.

    Attributes:
        first: position of the first token, at least 1.
        top: number of most probable tokens that are reported beside each token.
        logprobs: natural logarithm of the probability of each token under the unprocessed logits.
        ranks: rank of each token by its logit, from 1.
        top_tokens: for each token in turn, ids of the most probable tokens, in descending order.
        top_logprobs: their log probabilities.
    """

    first: int
    top: int
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    @property
    def finite(self) -> bool:
        """Whether all log probabilities are finite."""
        return all(map(math.isfinite, chain(self.logprobs, self.top_logprobs)))
