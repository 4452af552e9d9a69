"""Generated prompts with exact lengths, made of random words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from loadgen.errors import UsageError
from loadgen.workload.base import RequestSpec, Tokenizer
from loadgen.workload.lengths import IntArray, Lengths
from loadgen.workload.tokenizer import map_concurrently
from loadgen.workload.vocabulary import Passage, Vocabulary

BLOCK = 16
"""Number of prompts generated at a time."""

_MAX_FIXES = 4

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Draft:
    """Prompt before its conversion to text or token ids.

    Attributes:
        tokens: intended length, including special tokens added by the tokenizer.
    """

    passages: tuple[Passage, ...] = ()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt and its actual length in tokens."""

    prompt: str | tuple[int, ...]
    tokens: int


class PromptWriter:
    """Writes prompts for one target.

    Args:
        token_ids: whether prompts are token ids instead of text. Token ids have exactly the
            intended length. The length of a text can differ if the tokenizer merges words, or if
            the intended length is less than one word. `Prompt.tokens` is the actual length.

    Raises:
        UsageError: if the tokenizer is unreachable or has no tokens for English words.
    """

    def __init__(self, tokenizer: Tokenizer, *, token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self.vocabulary = Vocabulary(tokenizer)

    def extend(self, draft: Draft, drawn: IntArray, tokens: int) -> Draft:
        """Return the draft extended by ``tokens`` tokens.

        Args:
            drawn: words from `Vocabulary.draw`, at least ``tokens`` of them. Words that are not
                needed are ignored.
        """
        total = draft.tokens + tokens
        used = sum(len(passage.ids) for passage in draft.passages)
        room = total - len(self.vocabulary.lead) - used
        return Draft((*draft.passages, self.vocabulary.passage(drawn, room)), total)

    def write(self, drafts: Sequence[Draft]) -> list[Prompt]:
        """Return the prompts, in the order of their drafts.

        Raises:
            UsageError: if the tokenizer is unreachable.
        """
        if self._token_ids:
            return [self._ids(draft) for draft in drafts]
        return map_concurrently(self._text, drafts)

    def _ids(self, draft: Draft) -> Prompt:
        body = chain.from_iterable(passage.ids for passage in draft.passages)
        return Prompt((*self.vocabulary.lead, *body)[: draft.tokens], draft.tokens)

    def _text(self, draft: Draft) -> Prompt:
        text = "".join(passage.text for passage in draft.passages) or self.vocabulary.filler(1)
        text = text.removeprefix(" ")
        tokens = self._tokenizer.encode(text)
        for _ in range(_MAX_FIXES):
            excess = len(tokens) - draft.tokens
            body = self.vocabulary.body(tokens)
            if excess == 0 or (excess > 0 and len(body) == 1):
                break
            if excess > 0:
                text = self._tokenizer.decode(body[: max(1, len(body) - excess)])
            else:
                text += self.vocabulary.filler(-excess)
            tokens = self._tokenizer.encode(text)
        return Prompt(text, len(tokens))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prefixes shared by prompts.

    Attributes:
        tokens: length of each prefix, in addition to the length drawn for a prompt.
        groups: number of different prefixes; each prompt uses a random one.
    """

    tokens: int
    groups: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.groups < 1:
            raise UsageError(
                f"a shared prefix needs at least 1 token and 1 group, not {self.tokens} and "
                f"{self.groups}"
            )


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Endless random prompts.

    Lengths, words and prefixes are drawn from separate random generators. The lengths drawn for a
    seed are the same for text and token ids, and with and without prefixes.
    """

    inputs: Lengths
    outputs: Lengths
    writer: PromptWriter
    prefix: SharedPrefix | None = None

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield requests endlessly. ``seed`` must not be negative."""
        children = np.random.SeedSequence(seed).spawn(5)
        inputs, outputs, words, groups, prefixes = map(np.random.default_rng, children)
        shared = self._prefixes(prefixes)
        while True:
            lengths = self.inputs.draw(inputs, BLOCK).tolist()
            answers = self.outputs.draw(outputs, BLOCK).tolist()
            chosen = groups.integers(len(shared), size=BLOCK).tolist()
            drafts = [
                self._extend(shared[group], words, length)
                for group, length in zip(chosen, lengths, strict=True)
            ]
            for written, answer in zip(self.writer.write(drafts), answers, strict=True):
                yield RequestSpec(written.prompt, written.tokens, answer)

    def _prefixes(self, rng: np.random.Generator) -> list[Draft]:
        if self.prefix is None:
            return [Draft()]
        length = self.prefix.tokens
        return [self._extend(Draft(), rng, length) for _ in range(self.prefix.groups)]

    def _extend(self, draft: Draft, rng: np.random.Generator, tokens: int) -> Draft:
        return self.writer.extend(draft, self.writer.vocabulary.draw(rng, tokens), tokens)


def in_blocks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Split items into consecutive blocks of `BLOCK`."""
    return (items[start : start + BLOCK] for start in range(0, len(items), BLOCK))
