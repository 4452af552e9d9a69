"""Single requests with generated prompts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loadgen.workload.base import RequestSpec
from loadgen.workload.lengths import IntArray, Lengths
from loadgen.workload.prefix import SharedPrefix, salts, words_of
from loadgen.workload.prompts import BLOCK, PromptWriter, draft_of


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Endless random prompts.

    Lengths, words and prefixes are drawn from separate random generators. The lengths drawn for a
    seed are the same for text and token ids, and with and without prefixes.

    Attributes:
        cold: whether the first words of each prompt are unique instead of shared, so that no prefix
            cache holds any part of it. Lengths do not change.
        variant: runs of one seed with different variants differ in the words that are not shared.
    """

    inputs: Lengths
    outputs: Lengths
    writer: PromptWriter
    prefix: SharedPrefix | None = None
    cold: bool = False
    variant: int = 0

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield requests endlessly. ``seed`` must not be negative."""
        children = np.random.SeedSequence(seed).spawn(5)
        inputs, outputs, _, groups, prefixes = map(np.random.default_rng, children)
        words, unique = words_of(children[2], self.variant), salts() if self.cold else None
        draw, shared = self.writer.vocabulary.draw, self._prefixes(prefixes)
        while True:
            lengths = self.inputs.draw(inputs, BLOCK).tolist()
            answers = self.outputs.draw(outputs, BLOCK).tolist()
            chosen = [0] * BLOCK if self.prefix is None else self.prefix.choose(groups, BLOCK)
            drafts = [
                draft_of(self.writer, (shared[group], draw(words, length)), unique)
                for group, length in zip(chosen, lengths, strict=True)
            ]
            for written, answer in zip(self.writer.write(drafts), answers, strict=True):
                yield RequestSpec(written.prompt, written.tokens, answer)

    def _prefixes(self, rng: np.random.Generator) -> list[IntArray]:
        """Return the words of each prefix."""
        if self.prefix is None:
            return [np.empty(0, dtype=np.int64)]
        draw, length = self.writer.vocabulary.draw, self.prefix.tokens
        return [draw(rng, length) for _ in range(self.prefix.groups)]
