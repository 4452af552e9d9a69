"""Writing of prompts with exact lengths, made of random words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np

from loadgen.workload.base import Text, Tokenizer
from loadgen.workload.lengths import IntArray
from loadgen.workload.prefix import salt_tokens
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
    """Prompt, or a part of one, and its actual length in tokens."""

    prompt: Text
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

    def write_parts(self, parts: Sequence[tuple[IntArray, int]]) -> list[Prompt]:
        """Return parts of prompts, such as messages of a chat, without special tokens.

        Args:
            parts: words from `Vocabulary.draw` and the intended length of each part, at least 1.

        Raises:
            UsageError: if the tokenizer is unreachable.
        """
        passages = [self.vocabulary.passage(drawn, tokens) for drawn, tokens in parts]
        if self._token_ids:
            return [Prompt(passage.ids, len(passage.ids)) for passage in passages]
        special = self.vocabulary.special
        drafts = [
            Draft((passage,), tokens + special)
            for passage, (_, tokens) in zip(passages, parts, strict=True)
        ]
        written = map_concurrently(self._text, drafts)
        return [replace(prompt, tokens=prompt.tokens - special) for prompt in written]

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


def draft_of(
    writer: PromptWriter, parts: Sequence[IntArray], salts: np.random.Generator | None = None
) -> Draft:
    """Return a draft of several parts, each as many tokens as words are drawn for it.

    Args:
        salts: if given, a salt of its draws replaces the first tokens. The length is the same.
    """
    draft, end = Draft(), 0
    salt = 0 if salts is None else salt_tokens(sum(map(len, parts)))
    if salts is not None and salt:
        draft = writer.extend(draft, writer.vocabulary.draw(salts, salt), salt)
    for drawn in parts:
        end += len(drawn)
        if end > draft.tokens:
            draft = writer.extend(draft, drawn, end - draft.tokens)
    return draft


def in_blocks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Split items into consecutive blocks of `BLOCK`."""
    return (items[start : start + BLOCK] for start in range(0, len(items), BLOCK))
