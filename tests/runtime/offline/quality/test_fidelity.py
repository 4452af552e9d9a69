"""Similarity of outputs, with values computed by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import QualityError
from runtime.offline.quality.fidelity import (
    compare_outputs,
    edit_similarity,
    first_divergence,
    levenshtein,
    rouge1,
    token_match,
)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def naive(one: str, other: str) -> int:
    """Return the Levenshtein distance by its recursive definition, row by row."""
    row = list(range(len(other) + 1))
    for number, a in enumerate(one, 1):
        above, row = row, [number]
        for column, b in enumerate(other):
            row.append(min(above[column] + (a != b), above[column + 1] + 1, row[column] + 1))
    return row[-1]


def test_known_distances() -> None:
    assert levenshtein("kitten", "sitting") == 3
    assert levenshtein("", "abc") == levenshtein("abc", "") == 3
    assert levenshtein("flaw", "lawn") == 2
    assert edit_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert edit_similarity("", "") == 1


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_distance_equals_the_definition(one: str, other: str) -> None:
    assert levenshtein(one, other) == naive(one, other)


def test_rouge1_counts_common_words_once_for_each_occurrence() -> None:
    assert rouge1("The cat sat.", "the CAT") == pytest.approx(2 * 2 / 5)
    assert rouge1("a a b", "a c") == pytest.approx(2 * 1 / 5)
    assert rouge1("", "...") == 1
    assert rouge1("word", "") == 0


def test_tokens_of_outputs_with_different_lengths() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 4]) == 2
    assert first_divergence([1, 2, 3], [1, 2]) == 2
    assert first_divergence([1, 2], [1, 2]) == 2
    assert token_match([1, 2, 3, 4], [1, 5, 3]) == pytest.approx(2 / 4)


def test_summary_averages_over_the_prompts() -> None:
    reference = [[0, 1, 2, 3], [0, 1, 2, 3], [4, 4]]
    outputs = [[0, 1, 2, 3], [0, 1, 5, 3], [5, 4]]
    found = compare_outputs(reference, outputs, letters, prompts_hash="h", max_tokens=4)
    assert (found.prompts, found.prompts_hash, found.max_tokens) == (3, "h", 4)
    assert found.exact == pytest.approx(1 / 3)
    assert found.first_token == pytest.approx(2 / 3)
    assert found.mean_token == pytest.approx((1 + 0.75 + 0.5) / 3)
    assert found.divergence == 2  # of 4 (equal), 2 and 0
    assert found.rouge1 == pytest.approx(1 / 3)  # each output is one word
    assert found.edit_similarity == pytest.approx((1 + 0.75 + 0.5) / 3)


@pytest.mark.parametrize(("reference", "outputs"), [([], []), ([[1]], [[]])])
def test_missing_outputs_are_refused(reference: list[list[int]], outputs: list[list[int]]) -> None:
    with pytest.raises(QualityError, match="cannot be compared"):
        compare_outputs(reference, outputs, letters, prompts_hash="", max_tokens=1)
