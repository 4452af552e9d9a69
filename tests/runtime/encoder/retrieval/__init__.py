"""A labelled retrieval set: 200 questions, each with one of 200 short documents that answers it.

``facts.txt`` has a document and its question in each line. ``rankings.txt`` has, for each question,
the indices of the ten best documents as sentence-transformers ranks them with all-MiniLM-L6-v2 in
fp32. ``python -m tests.programs.encoder_retrieval --write`` computes it again.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

BEST = 10
"""Number of documents of a stored ranking."""
_FACTS = Path(__file__).with_name("facts.txt")
_RANKINGS = Path(__file__).with_name("rankings.txt")


def facts() -> tuple[list[str], list[str]]:
    """Return the documents, and the question that each of them answers."""
    lines = [line.split(" | ") for line in _FACTS.read_text().splitlines()]
    return [document for document, _ in lines], [question for _, question in lines]


def similarities(questions: Tensor, documents: Tensor) -> Tensor:
    """Return the cosine of every question and every document.

    Args:
        questions, documents: embeddings of length 1 `[n, dim]` and `[m, dim]`.

    Returns:
        fp64 `[n, m]`.
    """
    return questions.double() @ documents.double().T


def rankings(cosines: Tensor) -> list[list[int]]:
    """Return the indices of all documents for each question, the best first."""
    ranked: list[list[int]] = cosines.argsort(dim=1, descending=True, stable=True).tolist()
    return ranked


def recall(ranked: Sequence[Sequence[int]], count: int) -> float:
    """Return the share of questions whose document is among the first ``count``."""
    return sum(index in best[:count] for index, best in enumerate(ranked)) / len(ranked)


def stored_rankings() -> list[list[int]]:
    """Return the stored rankings of sentence-transformers."""
    return [[int(word) for word in line.split()] for line in _RANKINGS.read_text().splitlines()]


def store_rankings(ranked: Sequence[Sequence[int]]) -> None:
    """Replace the stored rankings."""
    lines = (" ".join(map(str, best[:BEST])) for best in ranked)
    _RANKINGS.write_text("".join(f"{line}\n" for line in lines))
