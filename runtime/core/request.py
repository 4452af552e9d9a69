"""What the runtime is asked to generate, and what it answers: values, without behaviour of a model.

A request is one prompt with one or more choices. Output tokens are counted from the end of the
prompt, also where some of them were generated elsewhere and come along as part of ``tokens``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from runtime.config import ModelConfig
from runtime.errors import InvalidRequest

MOST_LOGPROBS = 20
"""Alternatives beside a token, as in OpenAI's API."""


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from the model's distribution.

    The order is: ``logit_bias``, penalties, then the largest logit if ``temperature`` is 0, else
    temperature, ``min_p``, ``top_k`` (0: off), ``top_p`` and a draw that depends on ``seed``, the
    choice and the output index alone. ``logprobs`` asks for log probabilities of the token drawn
    and of that many most probable ones, in the model's own distribution, before any of the above.
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

    @property
    def reshapes(self) -> bool:
        """Whether logits are changed before the temperature."""
        return bool(
            self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raises `InvalidRequest` naming the first field that is out of bounds."""
        bounds = {
            "temperature": (self.temperature, 0.0, 1e6),
            "min_p": (self.min_p, 0.0, 1.0),
            "presence_penalty": (self.presence_penalty, -1e3, 1e3),
            "frequency_penalty": (self.frequency_penalty, -1e3, 1e3),
            "top_k": (self.top_k, 0, 2**31),
            "logprobs": (self.logprobs or 0, 0, min(vocab_size, MOST_LOGPROBS)),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:  # a NaN is not
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
                raise InvalidRequest(f"logit_bias names token {token}, of {vocab_size}")
            if not math.isfinite(bias):
                raise InvalidRequest(f"logit_bias of token {token} is {bias}")


@dataclass(frozen=True)
class Request:
    """One prompt, and how to continue it.

    ``tokens`` is the prompt followed by output tokens that were delivered already (a replay after
    a failover); the first ``prompt_tokens`` of them are the prompt. ``max_tokens`` counts output
    tokens of each choice, replayed ones included. ``stop_token_ids`` end a choice and are emitted.
    """

    id: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    choices: int = 1

    def validate(self, config: ModelConfig) -> None:
        """Raises `InvalidRequest` if the model cannot continue these tokens."""
        if not 1 <= self.prompt_tokens <= len(self.tokens):
            raise InvalidRequest(
                f"prompt_tokens must be between 1 and {len(self.tokens)}, not {self.prompt_tokens}"
            )
        if len(self.tokens) >= config.context_length:
            raise InvalidRequest(
                f"{len(self.tokens)} tokens leave no room in a context of {config.context_length}"
            )
        if min(self.tokens) < 0 or max(self.tokens) >= config.vocab_size:
            raise InvalidRequest(f"token ids must be between 0 and {config.vocab_size - 1}")
        if self.choices < 1:
            raise InvalidRequest(f"choices must be at least 1, not {self.choices}")
        replayed = len(self.tokens) - self.prompt_tokens
        if self.max_tokens <= replayed:
            raise InvalidRequest(f"max_tokens must be above {replayed}, not {self.max_tokens}")
        self.sampling.validate(config.vocab_size)


@dataclass(frozen=True)
class SampledToken:
    """One output token. ``index`` counts a choice's output tokens from the prompt's end, from 0.

    ``logprob`` and ``top`` (most probable first) are natural logarithms, in the model's own
    distribution; None and empty unless they were asked for.
    """

    choice: int
    index: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
