"""Similarity of generated outputs to reference outputs, as a measure of fidelity.

The reference is the same model's own output with exact KV or in fp32, not a text that a person
wrote. The measures say how far the output moves, and not whether it is better or worse.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from runtime.errors import QualityError
from runtime.offline.quality.prompts import Decode

_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Fidelity:
    """Similarity of the outputs of all prompts to the reference outputs.

    Attributes:
        prompts: number of prompts.
        prompts_hash: hash of their tokens.
        max_tokens: maximum tokens of an output.
        exact: fraction of outputs that are equal.
        first_token: fraction of outputs whose first token is equal.
        mean_token: fraction of positions with the same token, averaged over the prompts; an output
            that is shorter than the other differs at the missing positions.
        divergence: median position of the first different token; an output that is equal counts
            with its length.
        rouge1: mean F1 of ROUGE-1.
        edit_similarity: mean of 1 - Levenshtein distance / length of the longer text, over
            characters.
    """

    prompts: int
    prompts_hash: str
    max_tokens: int
    exact: float
    first_token: float
    mean_token: float
    divergence: float
    rouge1: float
    edit_similarity: float


def compare_outputs(
    reference: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    decode: Decode,
    *,
    prompts_hash: str,
    max_tokens: int,
) -> Fidelity:
    """Compare the output of each prompt with the reference output of the same prompt.

    Raises:
        QualityError: there is no output, or an output is empty.
    """
    pairs = list(zip(reference, outputs, strict=True))
    if not pairs or not all(one and other for one, other in pairs):
        raise QualityError("outputs cannot be compared: there are none, or one is empty")
    texts = [(decode(one), decode(other)) for one, other in pairs]
    return Fidelity(
        prompts=len(pairs),
        prompts_hash=prompts_hash,
        max_tokens=max_tokens,
        exact=fmean(list(one) == list(other) for one, other in pairs),
        first_token=fmean(one[0] == other[0] for one, other in pairs),
        mean_token=fmean(token_match(*pair) for pair in pairs),
        divergence=float(median(first_divergence(*pair) for pair in pairs)),
        rouge1=fmean(rouge1(*pair) for pair in texts),
        edit_similarity=fmean(edit_similarity(*pair) for pair in texts),
    )


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return next((index for index, equal in enumerate(same) if not equal), min(len(one), len(other)))


def token_match(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the fraction of positions at which both have the same token."""
    equal = sum(a == b for a, b in zip(one, other, strict=False))
    return equal / max(len(one), len(other))


def rouge1(reference: str, text: str) -> float:
    """Return the F1 of ROUGE-1: overlap of words, without stemming (Lin, 2004).

    Words are maximal sequences of letters and digits of ASCII, in lower case. Two texts without
    words are equal.
    """
    expected, found = (Counter(_WORD.findall(each.lower())) for each in (reference, text))
    total = expected.total() + found.total()
    return 2 * (expected & found).total() / total if total else 1.0


def edit_similarity(reference: str, text: str) -> float:
    """Return 1 - Levenshtein distance / length of the longer text; 1.0 for two empty texts."""
    longer = max(len(reference), len(text))
    return 1 - levenshtein(reference, text) / longer if longer else 1.0


def levenshtein(one: str, other: str) -> int:
    """Return the number of insertions, deletions and substitutions that turn one into the other.

    Insertions make an element of a row depend on the one before it. With the column's index
    subtracted, that dependence is a running minimum.
    """
    columns = np.arange(len(other) + 1)
    letters = np.array([ord(letter) for letter in other], dtype=np.int64)
    row = columns.copy()
    for number, letter in enumerate(one, 1):
        substituted = row[:-1] + (letters != ord(letter))
        row[1:] = np.minimum(substituted, row[1:] + 1)
        row[0] = number
        row = np.minimum.accumulate(row - columns) + columns
    return int(row[-1])
