"""Texts, pairs and token ids of clients to the inputs of an encoder, within its limits."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

from services.common.encoder_placement import EncoderModel
from services.common.errors import InvalidRequest, TooLarge
from services.gateway.encoding.models import ServedEncoder
from services.gateway.encoding.request import EncodingRequest
from services.gateway.keys import Tenant
from services.gateway.prompts import PromptTokenizer, runs_in_thread
from services.gateway.request_errors import ContextLengthExceeded
from services.gateway.requests import RequestContext
from services.gateway.settings import GatewaySettings
from services.tokenizer.encoder import EncoderTokens

_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of the prompt of documents in the files of models; the first one that exists is used."""


@dataclass(frozen=True)
class Tokenization:
    """Work that returns the inputs of a request.

    Attributes:
        size: bytes of the texts that it tokenizes, with the repetitions of queries and prompts.
        run: function that does it. It raises `InvalidRequest` if an input is invalid or too long.
    """

    size: int
    run: Callable[[], list[EncoderTokens]]

    def __add__(self, other: "Tokenization") -> "Tokenization":
        return Tokenization(self.size + other.size, lambda: self.run() + other.run())


@dataclass(frozen=True)
class InputBuilder:
    """Builds the inputs of one request.

    Attributes:
        facts: the encoder as its workers registered it.
        max_bytes: maximum bytes of a text or pair in UTF-8.
        limit: maximum tokens of a text or pair, whose end is cut off; None: longer ones are
            refused.
        ids_limit: as ``limit``, for inputs of token ids.
        part_tokens: see `EncodingRequest`.
    """

    encoder: ServedEncoder
    facts: EncoderModel
    max_bytes: int
    part_tokens: int
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
        # Larger parts would reach a worker together, so that it could not take short texts of
        # other requests first.
        part_tokens = min(settings.encode_part_tokens, encoder.batch_tokens)
        return cls(encoder, facts, settings.max_body_bytes, part_tokens, limit, ids_limit)

    def request(
        self,
        context: RequestContext,
        inputs: Sequence[EncoderTokens],
        *,
        priority: int,
        operation: str = "embeddings",
    ) -> EncodingRequest:
        """Return the request for inputs; see `EncodingRequest` for the arguments."""
        return EncodingRequest(
            context, self.facts, inputs, self.part_tokens, priority=priority, operation=operation
        )

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

    def texts(self, texts: Sequence[str], param: str, prompt: str = "") -> Tokenization:
        """Return the work that tokenizes texts.

        Args:
            param: field of the texts, for errors.
            prompt: text that precedes each of them.

        Raises:
            TooLarge: a text is larger than ``max_bytes``.
        """
        sizes = [len(text.encode()) for text in texts]
        self._check_sizes(sizes, param)
        self._check_limit(is_pair=False)
        size = sum(sizes) + len(prompt.encode()) * len(texts)
        encode_all = self.encoder.tokenizer.encode_all

        def run() -> list[EncoderTokens]:
            given = (prompt + text for text in texts)
            found = encode_all(given, limit=self.limit, parallel=runs_in_thread(size))
            return self._checked(found, param, len(texts))

        return Tokenization(size, run)

    def pairs(self, pairs: Sequence[tuple[str, str]], param: str) -> Tokenization:
        """Return the work that tokenizes pairs of texts; otherwise as `texts`.

        A text counts once for each of its pairs, because it is tokenized as often.
        """
        of_text = {text: len(text.encode()) for text in set(chain.from_iterable(pairs))}
        sizes = [of_text[first] + of_text[second] for first, second in pairs]
        self._check_sizes(sizes, param)
        self._check_limit(is_pair=True)
        size = sum(sizes)
        encode_pairs = self.encoder.tokenizer.encode_pairs

        def run() -> list[EncoderTokens]:
            found = encode_pairs(pairs, limit=self.limit, parallel=runs_in_thread(size))
            return self._checked(found, param, len(pairs))

        return Tokenization(size, run)

    def ids(self, inputs: Sequence[Sequence[int]], param: str) -> Tokenization:
        """Return the work that checks token ids, which are complete; ``param`` is as in `texts`."""
        return Tokenization(0, lambda: self._ids(inputs, param))

    def _ids(self, inputs: Sequence[Sequence[int]], param: str) -> list[EncoderTokens]:
        size = self.facts.vocab_size
        for index, tokens in enumerate(inputs):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < size:
                    raise InvalidRequest(
                        f"token id {token} is outside the vocabulary of {size} tokens; ids must be "
                        "those of the encoder's own tokenizer, not of tiktoken",
                        param=_place(param, index, len(inputs)),
                    )
        found = (EncoderTokens(tuple(tokens[: self.ids_limit])) for tokens in inputs)
        return self._checked(found, param, len(inputs))

    def _check_sizes(self, sizes: Sequence[int], param: str) -> None:
        """Refuse texts and pairs whose tokenization would need too much memory."""
        for index, size in enumerate(sizes):
            if size > self.max_bytes:
                where = _place(param, index, len(sizes))
                raise TooLarge(f"{where} has more than {self.max_bytes} bytes")

    def _check_limit(self, *, is_pair: bool) -> None:
        """Refuse a limit that leaves no token of a text beside the special tokens."""
        if self.limit is None:
            return
        special = self.encoder.tokenizer.special_tokens(is_pair=is_pair)
        if self.limit <= special:
            name = "truncate_prompt_tokens"
            raise InvalidRequest(
                f"{name} must be above {special}, the number of special tokens", param=name
            )

    def _checked(
        self, inputs: Iterable[EncoderTokens], param: str, count: int
    ) -> list[EncoderTokens]:
        """Collect ``count`` inputs; stop at the first one that is empty or too long."""
        longest = self.facts.max_tokens
        found = []
        for index, each in enumerate(inputs):
            length = len(each.tokens)
            if not length:
                where = _place(param, index, count)
                raise InvalidRequest(f"{where} has no tokens", param=where)
            if length > longest:
                where = _place(param, index, count)
                raise ContextLengthExceeded(
                    longest,
                    f"{length} tokens in {where}; set truncate_prompt_tokens to cut it",
                    param=where,
                    prompt_tokens=length,
                )
            found.append(each)
        return found


async def tokenize_inputs(
    prompts: PromptTokenizer,
    owner: Tenant,
    body_bytes: int,
    plan: Callable[[], Tokenization],
    *,
    limit: int,
    waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> list[EncoderTokens]:
    """Return the inputs of a request, which holds the slot of its body.

    Texts to tokenize may be much larger than the body, because a query is tokenized with each
    document and a prompt precedes each text. Slot and thread are those of the larger size.

    Args:
        plan: function that returns the work; it is cheap for small bodies.
        limit: maximum bytes to tokenize.
        waiting: context in which the request waits if there is no slot for it.

    Raises:
        TooLarge: there is more to tokenize than the limit.
        Overloaded: too many large requests wait.
    """
    work = await prompts.compute(body_bytes, plan)
    if work.size > limit:
        raise TooLarge(
            f"the request needs {work.size} bytes of text to be tokenized, more than {limit}: send "
            "fewer texts or pairs; a query counts once for each pair, a prompt for each text"
        )
    size = max(body_bytes, work.size)
    waits = not prompts.is_available(owner, size, held=body_bytes)
    async with waiting() if waits else nullcontext(), prompts.slot(owner, size, held=body_bytes):
        return await prompts.tokenize(size, work.run)


def _place(param: str, index: int, count: int) -> str:
    return f"{param}[{index}]" if count > 1 else param
