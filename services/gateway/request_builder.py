"""Construction of generation requests, within the limits of the settings and of the model."""

import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from runtime.grammar.spec import GrammarSpec
from services.common.errors import InvalidRequest
from services.common.messages import MAX_TOKENS
from services.common.token_ids import count_tokens, pack_tokens
from services.gateway.excluded_tokens import bad_word_ids, check_allowed
from services.gateway.limits import ModelLimits
from services.gateway.prompts import truncated
from services.gateway.request_errors import ContextLengthExceeded
from services.gateway.requests import (
    SEED_BITS,
    GenerationOptions,
    GenerationRequest,
    RequestContext,
)
from services.gateway.settings import GatewaySettings


class RequestBuilder:
    """Validates requests against the limits of the settings and of the model.

    Args:
        encode: function from a text to its token ids, without special tokens such as BOS.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        limits: ModelLimits,
        vocab_size: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._vocab_size = vocab_size
        self._encode = encode

    @property
    def _context_length(self) -> int:
        """Context length in tokens. While it is unknown, routers check the length of requests."""
        return self._limits.context_length or MAX_TOKENS

    def pack(self, prompt: Sequence[int]) -> bytes:
        """Return the token ids of a prompt that a client sent, packed for `build`.

        Raises:
            InvalidRequest: if an id is outside the vocabulary.
        """
        try:
            packed = pack_tokens(prompt)
        except struct.error:
            self.check_token(min(prompt), "prompt")
            packed = b""
        if prompt:
            self.check_token(max(prompt), "prompt")
        return packed

    def build(
        self,
        context: RequestContext,
        packed: bytes,
        options: GenerationOptions,
        *,
        chat: bool,
        names: Mapping[str, str] | None = None,
        shown: frozenset[str] = frozenset(),
    ) -> GenerationRequest:
        """Return a validated request.

        Args:
            packed: token ids of the prompt: the result of `pack`, or those of the tokenizer.
            chat: whether the prompt is a conversation. Without ``max_tokens``, the output may then
                fill the context; otherwise it has ``default_max_tokens`` of the settings.
            names: mapping from fields of ``options`` to their names in the client's request, if
                these differ. Error messages use the client's names.
            shown: names of special tokens that the text of the output includes.

        Raises:
            InvalidRequest: if a value is out of bounds; ``param`` names the field.
        """
        names = names or {}
        if options.truncate_prompt_tokens is not None:
            packed = truncated(
                packed,
                options.truncate_prompt_tokens,
                side=options.truncation_side,
                max_tokens=options.max_tokens or 1,
                context_length=self._context_length,
            )
        if not packed:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self._check_at_most("n", options.n, self._settings.max_choices)
        self._check_stop(options.stop)
        self._check_logit_bias(options.logit_bias)
        bad_words = self._check_exclusions(options)
        for name in ("logprobs", "prompt_logprobs"):
            top = getattr(options, name) or 0
            self._check_at_most(names.get(name, name), top, self._limits.max_logprobs)
        name = names.get("max_tokens", "max_tokens")
        if options.max_tokens == 0 and not options.echo and options.prompt_logprobs is None:
            raise InvalidRequest(
                f"{name} must be at least 1 without echo and prompt_logprobs", param=name
            )
        limit = None if options.max_tokens is None else max(1, options.max_tokens)
        max_tokens = self._max_tokens(count_tokens(packed), limit, name, chat)
        self._check_at_most("min_tokens", options.min_tokens, max_tokens, f"{name}, ")
        seed = secrets.randbits(SEED_BITS) if options.seed is None else options.seed
        request = GenerationRequest(
            context, packed, max_tokens, seed, options, chat, bad_words=bad_words, shown=shown
        )
        if options.constraint is None:
            return request
        return self.constrain(request, options.constraint.spec, options.constraint.field)

    @staticmethod
    def constrain(
        request: GenerationRequest, grammar: GrammarSpec, field: str
    ) -> GenerationRequest:
        """Return a request with a constraint on the output.

        Args:
            field: the client's field that requires it.

        Raises:
            InvalidRequest: if the client wants no end of the output.
        """
        if request.options.ignore_eos:
            raise InvalidRequest(
                f"ignore_eos cannot be combined with {field}, which determines where the output "
                "ends",
                param="ignore_eos",
            )
        return replace(request, grammar=grammar)

    def _max_tokens(self, prompt_tokens: int, limit: int | None, name: str, chat: bool) -> int:
        available = self._context_length - prompt_tokens
        completion = 1 if limit is None else limit
        if completion > available:
            part = "messages" if chat else "prompt"
            raise ContextLengthExceeded(
                self._context_length,
                f"{prompt_tokens + completion} tokens ({prompt_tokens} in the {part}, {completion} "
                "in the completion)",
                param=name if available > 0 else part,
                prompt_tokens=prompt_tokens,
                max_tokens=completion,
            )
        if limit is None:
            return available if chat else min(available, self._settings.default_max_tokens)
        return limit

    def _check_stop(self, stop: Sequence[str]) -> None:
        limits = self._settings
        if len(stop) > limits.max_stops:
            raise InvalidRequest(f"stop must have at most {limits.max_stops} strings", param="stop")
        if not all(1 <= len(text) <= limits.max_stop_chars for text in stop):
            raise InvalidRequest(
                f"a stop string must have 1 to {limits.max_stop_chars} characters", param="stop"
            )

    def _check_logit_bias(self, bias: Mapping[int, float]) -> None:
        limit = self._settings.max_logit_bias
        if len(bias) > limit:
            raise InvalidRequest(
                f"logit_bias must have at most {limit} entries", param="logit_bias"
            )
        for token in bias:
            self.check_token(token, "logit_bias")

    def _check_exclusions(self, options: GenerationOptions) -> tuple[tuple[int, ...], ...]:
        """Check the tokens that end the output and those that may be sampled.

        Returns:
            Bad words as token ids.
        """
        limits = self._settings
        for name, tokens, limit in (
            ("stop_token_ids", options.stop_token_ids, limits.max_stop_token_ids),
            ("allowed_token_ids", options.allowed_token_ids, limits.max_allowed_token_ids),
        ):
            if len(tokens) > limit:
                raise InvalidRequest(f"{name} must have at most {limit} entries", param=name)
            if tokens:
                self.check_token(max(tokens), name)
        if len(options.bad_words) > limits.max_bad_words:
            raise InvalidRequest(
                f"bad_words must have at most {limits.max_bad_words} entries", param="bad_words"
            )
        bad_words = bad_word_ids(options.bad_words, self._encode)
        check_allowed(
            set(options.allowed_token_ids),
            stops=options.stop_token_ids if options.min_tokens else (),
            bad_words=bad_words,
        )
        return bad_words

    def check_token(self, token: int, param: str) -> None:
        """Raise `InvalidRequest` if a token id in the field ``param`` is not in the vocabulary."""
        if not 0 <= token < self._vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary of {self._vocab_size} tokens",
                param=param,
            )

    @staticmethod
    def _check_at_most(name: str, value: int, limit: int, source: str = "") -> None:
        if value > limit:
            raise InvalidRequest(f"{name} must be at most {source}{limit}, not {value}", param=name)
