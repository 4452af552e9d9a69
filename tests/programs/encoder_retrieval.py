"""Rankings of a labelled retrieval set, compared with sentence-transformers, on the CPU.

``python -m tests.programs.encoder_retrieval`` embeds the questions and documents of
`tests.runtime.encoder.retrieval` with all-MiniLM-L6-v2 in fp32, and compares the rankings of all
documents for each question with those of sentence-transformers. Two documents may change places
only if the cosines of sentence-transformers differ by less than `TIE`. ``--url`` embeds them with a
deployment instead. ``--write`` stores the ten best documents of sentence-transformers, with which
`test_retrieval` compares.
"""

import argparse
import sys

import httpx
import torch
from tokenizers import Tokenizer
from torch import Tensor

from runtime.checkpoint import checkpoint_path
from runtime.encoder import EncoderTask, load_encoder
from tests.programs.encoder_equality import MODEL, in_batches, inputs_of, peer_results
from tests.runtime.encoder.retrieval import (
    BEST,
    facts,
    rankings,
    recall,
    similarities,
    store_rankings,
)

TIE = 1e-6
"""Cosines that differ by less are equal up to the rounding of fp32."""


def embedded(texts: list[str]) -> Tensor:
    """Return the embeddings of texts, computed in this process."""
    folder = checkpoint_path(MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return in_batches(load_encoder(folder), inputs_of(tokenizer, texts), 32)


def served(texts: list[str], url: str) -> Tensor:
    """Return the embeddings of texts, computed by a deployment."""
    answer = httpx.post(f"{url}/v1/embeddings", json={"input": texts}, timeout=600, trust_env=False)
    return torch.tensor([row["embedding"] for row in answer.raise_for_status().json()["data"]])


def swapped(found: list[list[int]], expected: Tensor) -> list[int]:
    """Return the questions whose ranking differs from the expected cosines by more than ties."""
    ordered = expected.gather(1, torch.tensor(found))
    is_lower = ordered[:, 1:] > ordered[:, :-1] + TIE
    rows: list[int] = is_lower.any(dim=1).nonzero().flatten().tolist()
    return rows


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.encoder_retrieval")
    parser.add_argument("--url", help="base URL of a deployment with the encoder, without /v1")
    parser.add_argument("--write", action="store_true", help="store the expected rankings")
    arguments = parser.parse_args()
    documents, questions = facts()
    texts = questions + documents
    peer, _ = peer_results(
        checkpoint_path(MODEL), EncoderTask.EMBED, texts, "float32", batch=32, repeats=1
    )
    expected = similarities(peer[: len(questions)], peer[len(questions) :])
    ranked = rankings(expected)
    first = expected.gather(1, torch.tensor(ranked))[:, : BEST + 1]
    least = float((first[:, :-1] - first[:, 1:]).min())
    _print(f"smallest difference of consecutive cosines among the best {BEST + 1}: {least:.1e}")
    if arguments.write:
        store_rankings(ranked)
    rows = served(texts, arguments.url) if arguments.url else embedded(texts)
    own = similarities(rows[: len(questions)], rows[len(questions) :])
    found = rankings(own)
    for name, each in (("sentence-transformers", ranked), ("Headrace", found)):
        _print(f"{name}: recall@1 {recall(each, 1):.3f}, recall@10 {recall(each, 10):.3f}")
    differing = swapped(found, expected)
    equal = sum(one == other for one, other in zip(found, ranked, strict=True))
    _print(
        f"largest difference of cosines {float((own - expected).abs().max()):.1e}; {equal} of "
        f"{len(questions)} rankings of {len(documents)} documents are equal, "
        f"{len(questions) - equal - len(differing)} up to ties, {len(differing)} differ"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
