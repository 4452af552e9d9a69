"""Texts, pairs and token ids of clients to the inputs of an encoder, within its limits."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.encoder_placement import EncoderModel
from services.common.errors import InvalidRequest, TooLarge
from services.gateway.encoding.models import ServedEncoder
from services.gateway.request_errors import ContextLengthExceeded
from services.gateway.settings import GatewaySettings
from services.tokenizer.encoder import EncoderTokens

_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of the prompt of documents in the files of models; the first one that exists is used."""


@dataclass(frozen=True)
class InputBuilder:
    """Builds the inputs of one request.

    Attributes:
        facts: the encoder as its workers registered it.
        max_bytes: maximum bytes of a text or pair in UTF-8.
        limit: maximum tokens of a text or pair, whose end is cut off; None: longer ones are
            refused.
        ids_limit: as ``limit``, for inputs of token ids.
    """

    encoder: ServedEncoder
    facts: EncoderModel
    max_bytes: int
    limit: int | None = None
    ids_limit: int | None = None

    @classmethod
    def of(
        cls, encoder: ServedEncoder, truncate_prompt_tokens: int | None, settings: GatewaySettings
    ) -> "InputBuilder":
        """Return a builder for a request.

        Args:
            truncate_prompt_tokens: maximum tokens of an input that the client set; -1: as many as
                the encoder supports; None: as the settings say, which apply only to texts. Cut
                token ids would lose the special token at their end.

        Raises:
            InvalidRequest: the limit is out of bounds.
            Unavailable: no worker has registered yet.
        """
        facts = encoder.known()
        limit = truncate_prompt_tokens
        if limit is not None and not (limit == -1 or 1 <= limit <= facts.max_tokens):
            name = "truncate_prompt_tokens"
            raise InvalidRequest(f"{name} must be -1, or from 1 to {facts.max_tokens}", param=name)
        if limit == -1:
            limit = facts.max_tokens
        ids_limit = limit
        if limit is None and settings.truncate_inputs:
            limit = facts.max_tokens
        return cls(encoder, facts, settings.max_body_bytes, limit, ids_limit)

    def prompt(self, name: str | None) -> str:
        """Return the prompt of this name that precedes texts; None: the default of the encoder.

        Raises:
            InvalidRequest: there is none of this name.
        """
        prompts = self.encoder.tokenizer.prompts
        try:
            return prompts.text(name)
        except KeyError:
            known = ", ".join(map(repr, sorted(prompts.by_name))) or "none"
            raise InvalidRequest(
                f"the encoder has no prompt of this name; it has {known}", param="prompt_name"
            ) from None

    @property
    def query_prompt(self) -> str:
        """Prompt of queries: the one of this name, else the default."""
        prompts = self.encoder.tokenizer.prompts
        return prompts.by_name.get("query", prompts.text(None))

    @property
    def document_prompt(self) -> str:
        """Prompt of documents: the one that the encoder has for them, else the default."""
        prompts = self.encoder.tokenizer.prompts
        names = (name for name in _DOCUMENT_PROMPTS if name in prompts.by_name)
        return prompts.text(next(names, None))

    def texts(self, texts: Sequence[str], param: str, prompt: str = "") -> list[EncoderTokens]:
        """Return the inputs of texts.

        Args:
            param: field of the texts, for errors.
            prompt: text that precedes each of them.
        """
        self._check_size([(text,) for text in texts], param)
        encode = self.encoder.tokenizer.encode
        found = [encode(prompt + text, limit=self.limit) for text in texts]
        return self._checked(found, param)

    def pairs(self, pairs: Sequence[tuple[str, str]], param: str) -> list[EncoderTokens]:
        """Return the inputs of pairs of texts; ``param`` is as in `texts`."""
        self._check_size(pairs, param)
        encode = self.encoder.tokenizer.encode_pair
        found = [encode(first, second, limit=self.limit) for first, second in pairs]
        return self._checked(found, param)

    def ids(self, inputs: Sequence[Sequence[int]], param: str) -> list[EncoderTokens]:
        """Return the inputs of token ids, which are complete; ``param`` is as in `texts`.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        size = self.facts.vocab_size
        for index, tokens in enumerate(inputs):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < size:
                    raise InvalidRequest(
                        f"token id {token} is outside the vocabulary of {size} tokens; ids must be "
                        "those of the encoder's own tokenizer, not of tiktoken",
                        param=_place(param, index, inputs),
                    )
        found = [EncoderTokens(tuple(tokens[: self.ids_limit])) for tokens in inputs]
        return self._checked(found, param)

    def _check_size(self, inputs: Sequence[Sequence[str]], param: str) -> None:
        """Refuse texts whose tokenization would need too much memory."""
        for index, texts in enumerate(inputs):
            if sum(len(text.encode()) for text in texts) > self.max_bytes:
                where = _place(param, index, inputs)
                raise TooLarge(f"{where} has more than {self.max_bytes} bytes")

    def _checked(self, inputs: list[EncoderTokens], param: str) -> list[EncoderTokens]:
        longest = self.facts.max_tokens
        for index, each in enumerate(inputs):
            count = len(each.tokens)
            if not count:
                where = _place(param, index, inputs)
                raise InvalidRequest(f"{where} has no tokens", param=where)
            if count > longest:
                where = _place(param, index, inputs)
                raise ContextLengthExceeded(
                    longest,
                    f"{count} tokens in {where}; set truncate_prompt_tokens to cut it",
                    param=where,
                    prompt_tokens=count,
                )
        return inputs


def _place(param: str, index: int, inputs: Sequence[object]) -> str:
    return f"{param}[{index}]" if len(inputs) > 1 else param
