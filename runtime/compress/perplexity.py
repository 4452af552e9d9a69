"""Perplexity of a checkpoint on held-out text."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint
from runtime.compress.forward import forward
from runtime.errors import CompressionError

Progress = Callable[[str, float], None]
"""Callback with the name of the current stage and the overall fraction done, 0 to 1."""


@torch.inference_mode()
def perplexity(checkpoint: Checkpoint, tokens: Tensor, progress: Progress | None = None) -> float:
    """Return the exponential of the mean negative log-likelihood (in nats) per token.

    Args:
        tokens: int64 ``[n, length]``. Each row is a separate text; every token but its first is
            predicted.

    Raises:
        CompressionError: there is no token to predict.
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
