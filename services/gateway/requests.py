"""The generation request, and its fields with their bounds.

`GenerationFields` declares each field once, for HTTP and gRPC. Field names equal those of the
protobuf messages ``GenerateRequest`` and ``Sampling``, so that both conversions are generic.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)

from runtime.grammar.spec import GrammarSpec
from services.common.messages import MAX_PRIORITY
from services.common.prefix_hashes import prefix_hashes
from services.common.token_ids import count_tokens
from services.common.tracing import NO_SPAN, Span
from services.gateway.constraints import Constraint
from services.gateway.keys import Tenant

SEED_BITS = 64
"""Size of a seed, bits."""
_MIN_REPETITION_PENALTY = 0.01
"""Minimum penalty. Logits are divided by it and must remain finite."""
_MIN_TOP_P = 1e-6
"""Minimum ``top_p``. It keeps one token only, and smaller values could underflow to 0."""
_MAX_LOGIT_BIAS = 100.0
_MAX_SALT_CHARS = 1024
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _parse_logit_bias(bias: Any) -> dict[int, float]:
    """Convert the keys to token ids. Stop at the first error: there may be 100,000 entries."""
    if not isinstance(bias, Mapping):
        raise ValueError("must map token ids to numbers")
    parsed = {}
    for token, value in bias.items():
        if isinstance(token, str) and not _TOKEN_ID.fullmatch(
            token
        ):  # int() would accept more, such as signs and spaces
            raise ValueError("keys must be token ids")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("values must be numbers")
        if not -_MAX_LOGIT_BIAS <= value <= _MAX_LOGIT_BIAS:  # also rejects NaN
            raise ValueError(f"values must be between -100 and 100, not {value}")
        parsed[int(token)] = value
    return parsed


def _parse_stop(stop: Any) -> Any:
    """Convert a single string, or any sequence such as a repeated protobuf field, to a list."""
    if isinstance(stop, str):
        return [stop]
    return _as_list(stop)


def _as_list(values: Any) -> Any:
    """Convert a sequence that is not a string, such as a repeated protobuf field, to a list."""
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str) else values


_LOGIT_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}

_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}

Temperature = Annotated[float, Field(ge=0, le=2, description="0 is greedy")]
TopP = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="total probability of the most likely tokens to keep; 0 keeps one token",
    ),
    AfterValidator(lambda p: max(_MIN_TOP_P, p)),
]
TopK = Annotated[
    int,
    Field(ge=-1, lt=1 << 31, description="0 or -1 keeps all tokens"),
    AfterValidator(lambda k: max(0, k)),
]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Stop = Annotated[
    tuple[str, ...],
    Field(
        strict=False,
        fail_fast=True,
        description="strings that end the output, which does not include them",
    ),
    BeforeValidator(_parse_stop),
    WithJsonSchema(_STOP_SCHEMA),
]

_TokenIds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    Field(strict=False, fail_fast=True),
    BeforeValidator(_as_list),
    WithJsonSchema(_TOKEN_IDS_SCHEMA),
]
_BadWords = Annotated[
    tuple[str, ...],
    Field(strict=False, fail_fast=True),
    BeforeValidator(_as_list),
    WithJsonSchema({"type": "array", "items": {"type": "string"}}),
]


class GenerationFields(BaseModel):
    """Fields that completions, chat completions and gRPC share. Settings limit some of them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    max_tokens: (
        Annotated[int, Field(ge=1, description="maximum output tokens of each choice")] | None
    ) = None
    min_tokens: Annotated[
        int,
        Field(
            ge=0,
            lt=1 << 31,
            description="minimum output tokens of each choice before an end-of-sequence token or a "
            "stop string ends it",
        ),
    ] = 0
    n: Annotated[int, Field(ge=1, description="number of choices for each prompt")] = 1
    stop: _Stop = ()
    stop_token_ids: Annotated[
        _TokenIds, Field(description="tokens that end the output, besides end-of-sequence tokens")
    ] = ()
    include_stop_str_in_output: Annotated[
        bool,
        Field(description="the text includes the stop string or stop token that ended it"),
    ] = False
    seed: (
        Annotated[
            int,
            Field(ge=-(1 << (SEED_BITS - 1)), lt=1 << SEED_BITS, description="default: random"),
            AfterValidator(lambda seed: seed % (1 << SEED_BITS)),
        ]
        | None
    ) = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Annotated[
        float,
        Field(ge=0, le=1, description="least probability of a token, relative to the most likely"),
    ] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=_MIN_REPETITION_PENALTY, le=10)] = 1.0
    logit_bias: Annotated[
        dict[int, float],
        BeforeValidator(_parse_logit_bias),
        WithJsonSchema(_LOGIT_BIAS_SCHEMA),
    ] = Field(default_factory=dict)
    allowed_token_ids: Annotated[
        _TokenIds, Field(description="the only tokens that may be sampled; default: all")
    ] = ()
    bad_words: Annotated[
        _BadWords,
        Field(
            description="words that the output does not contain, with or without a leading space"
        ),
    ] = ()
    truncate_prompt_tokens: (
        Annotated[
            int,
            Field(
                ge=-1,
                lt=1 << 31,
                description="maximum tokens of the prompt, which is cut on `truncation_side`; -1: "
                "as many as fit the context beside `max_tokens`",
            ),
        ]
        | None
    ) = None
    truncation_side: Annotated[
        Literal["left", "right"], Field(description="side on which the prompt is cut")
    ] = "left"
    prompt_logprobs: (
        Annotated[
            int,
            Field(
                ge=0,
                description="return log probabilities of the prompt's tokens, with this number of "
                "alternatives, as in vLLM",
            ),
        ]
        | None
    ) = None
    ignore_eos: Annotated[
        bool, Field(description="continue past end-of-sequence tokens, as in vLLM")
    ] = False
    priority: Annotated[
        int,
        Field(
            ge=-MAX_PRIORITY,
            le=MAX_PRIORITY,
            description="lower values are handled first, among the requests of one tenant; "
            "values below that of the API key count as that one",
        ),
    ] = 0
    cache_salt: (
        Annotated[
            str,
            Field(
                min_length=1,
                max_length=_MAX_SALT_CHARS,
                description="only requests with the same salt reuse the cached KV of one another, "
                "as in vLLM; those of different tenants (names of API keys) never do",
            ),
        ]
        | None
    ) = None


MaxTokens = (
    Annotated[
        int,
        Field(
            ge=0,
            description="maximum output tokens of each choice; 0 only with `echo` or "
            "`prompt_logprobs`",
        ),
    ]
    | None
)
"""Type of ``max_tokens`` where no output may be wanted."""


class GenerationOptions(GenerationFields):
    """Generation parameters of one request, in the same form for HTTP and gRPC.

    Attributes:
        constraint: constraint on the text, which `GrammarChecker` has checked; None: any text.
    """

    constraint: Constraint | None = None

    max_tokens: MaxTokens = None
    logprobs: (
        Annotated[int, Field(ge=0, description="number of alternatives for each token")] | None
    ) = None
    echo: Annotated[
        bool,
        Field(description="start the text with the prompt; `logprobs` then includes its tokens"),
    ] = False

    @property
    def prompt_top(self) -> int | None:
        """Number of alternatives that workers report for each prompt token; None for none."""
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((top for top in wanted if top is not None), default=None)


@dataclass(frozen=True)
class RequestContext:
    """Identity, arrival and deadline of a request. Times are those of `time.monotonic`, seconds.

    Event loops have the same clock, but that of uvloop has a resolution of 1 ms only.

    Attributes:
        tenant: owner of the API key; None if no key is required.
        span: span of the whole request.
        client: address of the client, as `services.common.clients.Client` names it.
    """

    request_id: str
    tenant: Tenant | None
    arrived: float
    deadline: float
    span: Span = NO_SPAN
    client: str = ""

    @property
    def owner(self) -> Tenant:
        """Owner for fair sharing of resources: the tenant, or the client without an API key."""
        return self.tenant or Tenant(self.client)


def cache_salt(tenant: Tenant | None, own: str | None) -> bytes:
    """Return the salt of a request: only requests with the same salt share caches.

    Otherwise, one tenant could find out the prompts of another by the time of answers.

    Args:
        tenant: owner of the API key; None if no key is required.
        own: salt of the client.

    Returns:
        Empty bytes if both are None, else a hash.
    """
    if tenant is None and own is None:
        return b""
    return hashlib.sha256(json.dumps([tenant and tenant.id, own]).encode()).digest()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to complete, validated.

    Attributes:
        packed: token ids of the prompt, see `services.common.token_ids`.
        max_tokens: maximum output tokens of each choice, at least 1. If the client sent none, the
            workers may have space for fewer. If it sent 0, the output is dropped.
        seed: the client's seed, or a random one; 64 bits.
        options: all parameters as the client sent them. ``options.max_tokens`` and
            ``options.seed`` may be None; use the attributes of this class instead.
        bad_words: bad words of the options as token ids.
        chat: whether the prompt is a conversation.
        shown: names of special tokens that the text of the output includes.
        grammar: constraint on the output; None: any output.
        prefix: hashes of the beginning of the prompt, see `services.common.prefix_hashes`.
    """

    context: RequestContext
    packed: bytes
    max_tokens: int
    seed: int
    options: GenerationOptions
    chat: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    shown: frozenset[str] = frozenset()
    grammar: GrammarSpec | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return count_tokens(self.packed)

    @cached_property
    def prefix(self) -> tuple[bytes, ...]:
        if self.options.prompt_top is not None:  # the whole prompt is computed
            return ()
        return prefix_hashes(self.packed, self.cache_salt)

    @property
    def cache_salt(self) -> bytes:
        """Salt of the KV: only requests with the same salt reuse the KV of one another."""
        return cache_salt(self.context.tenant, self.options.cache_salt)

    @property
    def priority(self) -> int:
        """Priority among the requests of the tenant, which the API key limits. Lower is earlier."""
        tenant = self.context.tenant
        wanted = self.options.priority
        return wanted if tenant is None else max(wanted, tenant.first_priority)

    @property
    def required_tokens(self) -> int | None:
        """Output tokens that must fit on the workers; None: all of ``max_tokens``."""
        return max(1, self.options.min_tokens) if self.options.max_tokens is None else None
