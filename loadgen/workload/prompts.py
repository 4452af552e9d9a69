"""Prompts of wanted lengths, made of random words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from loadgen.errors import UsageError
from loadgen.workload.base import Ask, Tokenizer
from loadgen.workload.lengths import IntArray, Lengths
from loadgen.workload.tokenizer import together
from loadgen.workload.vocabulary import Passage, Vocabulary

BLOCK = 16
"""Prompts made together, ahead of the one that is asked for."""

_FIXES = 4

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt before it is text or token ids.

    Attributes:
        tokens: the length wanted, with what the tokenizer puts before a text.
    """

    passages: tuple[Passage, ...] = ()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt and its actual length."""

    prompt: str | tuple[int, ...]
    tokens: int


class PromptWriter:
    """Makes prompts for one target.

    Args:
        token_ids: whether prompts are token ids, which have exactly the wanted length, or text.
            A text has it too, unless its target's tokenizer joins words; it is never shorter than
            a word. `Written.tokens` tells.

    Raises:
        UsageError: the tokenizer cannot be asked, or makes nothing of English words.
    """

    def __init__(self, tokenizer: Tokenizer, *, token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self.vocabulary = Vocabulary(tokenizer)

    def extend(self, draft: Draft, drawn: IntArray, tokens: int) -> Draft:
        """The draft with ``tokens`` more, made of drawn words, of which there must be as many."""
        total = draft.tokens + tokens
        used = sum(len(passage.ids) for passage in draft.passages)
        room = total - len(self.vocabulary.lead) - used
        return Draft((*draft.passages, self.vocabulary.passage(drawn, room)), total)

    def write(self, drafts: Sequence[Draft]) -> list[Written]:
        """The prompts, in the order of their drafts.

        Raises:
            UsageError: the tokenizer cannot be asked.
        """
        if self._token_ids:
            return [self._ids(draft) for draft in drafts]
        return together(self._text, drafts)

    def _ids(self, draft: Draft) -> Written:
        body = chain.from_iterable(passage.ids for passage in draft.passages)
        return Written((*self.vocabulary.lead, *body)[: draft.tokens], draft.tokens)

    def _text(self, draft: Draft) -> Written:
        text = "".join(passage.text for passage in draft.passages) or self.vocabulary.filler(1)
        text = text.removeprefix(" ")
        tokens = self._tokenizer.encode(text)
        for _ in range(_FIXES):
            excess = len(tokens) - draft.tokens
            body = self.vocabulary.body(tokens)
            if excess == 0 or (excess > 0 and len(body) == 1):
                break
            if excess > 0:
                text = self._tokenizer.decode(body[: max(1, len(body) - excess)])
            else:
                text += self.vocabulary.filler(-excess)
            tokens = self._tokenizer.encode(text)
        return Written(text, len(tokens))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prompts begin alike within a group, and the groups differently.

    Attributes:
        tokens: of each prefix; they come on top of the length that is drawn for a prompt.
        groups: of which each prompt belongs to one, at random.
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
    """Random prompts without an end.

    Lengths, words and groups have random generators of their own: the same seed gives the same
    lengths whether prompts are text or token ids, and with a prefix or without.
    """

    inputs: Lengths
    outputs: Lengths
    writer: PromptWriter
    prefix: SharedPrefix | None = None

    def asks(self, seed: int) -> Iterator[Ask]:
        """The requests. ``seed`` is not negative."""
        children = np.random.SeedSequence(seed).spawn(5)
        inputs, outputs, words, groups, prefixes = map(np.random.default_rng, children)
        openings = self._openings(prefixes)
        while True:
            lengths = self.inputs.draw(inputs, BLOCK).tolist()
            answers = self.outputs.draw(outputs, BLOCK).tolist()
            chosen = groups.integers(len(openings), size=BLOCK).tolist()
            drafts = [
                self._extend(openings[group], words, length)
                for group, length in zip(chosen, lengths, strict=True)
            ]
            for written, answer in zip(self.writer.write(drafts), answers, strict=True):
                yield Ask(written.prompt, written.tokens, answer)

    def _openings(self, rng: np.random.Generator) -> list[Draft]:
        if self.prefix is None:
            return [Draft()]
        length = self.prefix.tokens
        return [self._extend(Draft(), rng, length) for _ in range(self.prefix.groups)]

    def _extend(self, draft: Draft, rng: np.random.Generator, tokens: int) -> Draft:
        return self.writer.extend(draft, self.writer.vocabulary.draw(rng, tokens), tokens)


def in_blocks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """The items in their order, `BLOCK` of them at a time."""
    return (items[start : start + BLOCK] for start in range(0, len(items), BLOCK))
