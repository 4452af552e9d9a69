"""A generation request as the gateway keeps it, and the one place that checks what was asked."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.v1 import sampling_pb2
from services.common.errors import InvalidRequest
from services.gateway.settings import GatewaySettings

_SEED_BITS = 64
_LEAST_PENALTY = 0.01  # of repetition: it divides logits, and infinite ones have no distribution
_LEAST_TOP_P = 1e-6  # a smaller one also keeps one token, until it underflows and keeps none


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedField(InvalidRequest):
    """A field that is not served, refused by its name."""

    code = "unsupported_parameter"


@dataclass(frozen=True)
class Wanted:
    """What a client asked for, whichever way it came; None where it said nothing."""

    max_tokens: int | None = None
    n: int | None = None
    stop: Sequence[str] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False
    names: Mapping[str, str] = field(default_factory=dict)  # of fields that came under another

    def name(self, field_name: str) -> str:
        """What the client calls a field, for errors."""
        return self.names.get(field_name, field_name)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to answer, checked and complete. ``deadline`` and ``arrived`` are the event loop's
    time, in seconds."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: sampling_pb2.Sampling
    max_tokens: int  # of each choice
    choices: int
    stop: tuple[str, ...]
    ignore_eos: bool  # nothing but ``stop`` and ``max_tokens`` ends it
    tenant: str | None
    arrived: float
    deadline: float


@dataclass(frozen=True)
class Arrival:
    """What is known of a request before its content: who, when, and until when."""

    request_id: str
    tenant: str | None
    arrived: float
    deadline: float


class Checker:
    """Turns what was wanted into requests, within the bounds of settings and model."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        context_length: int,
        vocab_size: int,
    ) -> None:
        self._settings = settings
        self._context_length = context_length
        self._vocab_size = vocab_size

    def build(
        self, arrival: Arrival, prompt: Sequence[int], wanted: Wanted, *, fill_context: bool
    ) -> GenerationRequest:
        """A checked request.

        Args:
            fill_context: an absent ``max_tokens`` means all that fits, not the default.

        Raises:
            InvalidRequest: ``param`` names what is out of bounds.
        """
        return GenerationRequest(
            request_id=arrival.request_id,
            prompt=tuple(prompt),
            sampling=self._sampling(wanted),
            max_tokens=self._max_tokens(prompt, wanted, fill_context=fill_context),
            choices=int(_within("n", wanted.n, 1, 1, self._settings.max_choices)),
            stop=self._stop(wanted.stop),
            ignore_eos=wanted.ignore_eos,
            tenant=arrival.tenant,
            arrived=arrival.arrived,
            deadline=arrival.deadline,
        )

    def _max_tokens(self, prompt: Sequence[int], wanted: Wanted, *, fill_context: bool) -> int:
        context = self._context_length
        room = context - len(prompt)
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens and leaves no room in the model's context "
                f"of {context}",
                param="prompt",
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary of {self._vocab_size}",
                    param="prompt",
                )
        limit, name = wanted.max_tokens, wanted.name("max_tokens")
        if limit is None:
            return room if fill_context else min(room, self._settings.default_max_tokens)
        if limit < 1:
            raise InvalidRequest(f"{name} must be at least 1, not {limit}", param=name)
        if limit > room:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens: with {name} {limit} it does not fit "
                f"the model's context of {context}",
                param=name,
            )
        return limit

    def _stop(self, stop: Sequence[str]) -> tuple[str, ...]:
        limits = self._settings
        if len(stop) > limits.max_stops:
            raise InvalidRequest(f"at most {limits.max_stops} stop strings", param="stop")
        for text in stop:
            if not 1 <= len(text) <= limits.max_stop_chars:
                raise InvalidRequest(
                    f"a stop string has 1 to {limits.max_stop_chars} characters", param="stop"
                )
        return tuple(stop)

    def _sampling(self, wanted: Wanted) -> sampling_pb2.Sampling:
        top_k = -1 if wanted.top_k is None else wanted.top_k
        return sampling_pb2.Sampling(
            temperature=_within("temperature", wanted.temperature, 1.0, 0, 2),
            top_p=max(_LEAST_TOP_P, _positive("top_p", wanted.top_p, 1.0, 1)),
            top_k=max(0, int(_within("top_k", top_k, 0, -1, (1 << 31) - 1))),
            min_p=_within("min_p", wanted.min_p, 0.0, 0, 1),
            seed=_seed(wanted.seed),
            presence_penalty=_within("presence_penalty", wanted.presence_penalty, 0.0, -2, 2),
            frequency_penalty=_within("frequency_penalty", wanted.frequency_penalty, 0.0, -2, 2),
            repetition_penalty=_within(
                "repetition_penalty", wanted.repetition_penalty, 1.0, _LEAST_PENALTY, 10
            ),
            logit_bias=self._logit_bias(wanted.logit_bias),
            logprobs=None
            if wanted.logprobs is None
            else int(
                _within(wanted.name("logprobs"), wanted.logprobs, 0, 0, self._settings.max_logprobs)
            ),
        )

    def _logit_bias(self, bias: Mapping[int, float]) -> Mapping[int, float]:
        if len(bias) > self._settings.max_logit_bias:
            raise InvalidRequest(
                f"at most {self._settings.max_logit_bias} entries", param="logit_bias"
            )
        for token, value in bias.items():
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary of {self._vocab_size}",
                    param="logit_bias",
                )
            _within("logit_bias", value, 0.0, -100, 100)
        return bias


def _within(name: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:  # also where it is not a number
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", param=name)
    return value


def _positive(name: str, value: float | None, default: float, high: float) -> float:
    if value is None:
        return default
    if not 0 < value <= high:
        raise InvalidRequest(
            f"{name} must be greater than 0 and at most {high}, not {value}", param=name
        )
    return value


def _seed(wanted: int | None) -> int:
    if wanted is None:
        return secrets.randbits(_SEED_BITS)
    if not -(1 << (_SEED_BITS - 1)) <= wanted < 1 << _SEED_BITS:
        raise InvalidRequest(f"seed must fit {_SEED_BITS} bits", param="seed")
    return wanted % (1 << _SEED_BITS)
