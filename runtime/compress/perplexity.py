"""Perplexity on held-out text: what a factorization costs in quality."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint
from runtime.compress.forward import forward
from runtime.errors import CompressionError

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of the whole is done, 0 to 1."""


@torch.inference_mode()
def perplexity(checkpoint: Checkpoint, tokens: Tensor, progress: Progress | None = None) -> float:
    """exp of the mean negative log likelihood, in nats, of ``tokens`` ``[n, length]`` int64.

    Each row is a text of its own; all of its tokens but the first are predicted.

    Raises `CompressionError` if there is nothing to predict.
    """
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise CompressionError(f"perplexity needs [n, length ≥ 2] tokens, not {list(tokens.shape)}")
    total = 0.0
    for done, row in enumerate(tokens.to(checkpoint.embedding.device)):
        predicted = forward(checkpoint, row[None])[0, :-1].float()
        total += functional.cross_entropy(predicted, row[1:], reduction="sum").item()
        if progress is not None:
            progress("perplexity", (done + 1) / tokens.shape[0])
    return math.exp(total / tokens[:, 1:].numel())
