"""Beginnings of prompts: shared prefixes and unique salts."""

from dataclasses import dataclass

import numpy as np

from loadgen.errors import UsageError
from loadgen.workload.lengths import IntArray

SALT_TOKENS = 12
"""Tokens of a salt. With 400 words, some of 10^9 salts are equal with a probability of 3e-14."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prefixes shared by prompts, such as system prompts.

    Attributes:
        tokens: length of each prefix, in addition to the length drawn for a prompt.
        groups: number of different prefixes; each prompt uses a random one.
        skew: exponent of Zipf's law. Prefix k = 1, 2, … is chosen with a probability proportional
            to ``k ** -skew``; 0 chooses all equally often.

    Raises:
        UsageError: if a value is out of range.
    """

    tokens: int
    groups: int = 1
    skew: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.groups < 1:
            raise UsageError(
                f"a shared prefix needs at least 1 token and 1 group, not {self.tokens} and "
                f"{self.groups}"
            )
        if not 0 <= self.skew <= 10:
            raise UsageError(f"the skew of prefixes must be 0 to 10, not {self.skew:g}")

    def choose(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return the groups of ``count`` prompts."""
        if not self.skew:
            return list(map(int, rng.integers(self.groups, size=count)))
        weights = np.arange(1, self.groups + 1, dtype=np.float64) ** -self.skew
        chosen: IntArray = rng.choice(self.groups, size=count, p=weights / weights.sum())
        return list(map(int, chosen))


def salt_tokens(tokens: int) -> int:
    """Return the length of a salt that replaces the beginning of a text of ``tokens`` tokens."""
    return min(SALT_TOKENS, tokens - 1)


def salts() -> np.random.Generator:
    """Return a random generator of salts. It differs in each run, whatever the seed.

    Otherwise a run would find the prompts of an earlier run with the same seed in a prefix cache.
    """
    return np.random.default_rng()


def words_of(child: np.random.SeedSequence, variant: int) -> np.random.Generator:
    """Return the random generator of words that are not shared.

    Args:
        child: seed of these words.
        variant: runs of one seed with different variants have different words.
    """
    if variant:
        child = np.random.SeedSequence(child.entropy, spawn_key=(*child.spawn_key, variant))
    return np.random.default_rng(child)
