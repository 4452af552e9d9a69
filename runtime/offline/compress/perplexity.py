"""Perplexity of a checkpoint on held-out text."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint
from runtime.errors import CompressionError
from runtime.offline.compress.layerwise import LayerwiseModel

Progress = Callable[[str, float], None]
"""Callback with the name of the current stage and the overall fraction done, 0 to 1."""


@torch.inference_mode()
def perplexity(
    checkpoint: Checkpoint,
    tokens: Tensor,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> float:
    """Return the exponential of the mean negative log-likelihood (in nats) per token.

    Layers are computed one after another for all rows, in fp32.

    Args:
        tokens: int64 ``[n, length]``. Each row is a separate text; every token but its first is
            predicted.
        device: device of the computation. It holds one layer at a time.

    Raises:
        CompressionError: there is no token to predict.
    """
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise CompressionError(f"perplexity needs [n, length ≥ 2] tokens, not {list(tokens.shape)}")
    model = LayerwiseModel(checkpoint, device)
    hidden = model.embed(tokens)
    steps = checkpoint.config.num_layers + 1
    for index in range(checkpoint.config.num_layers):
        model.forward(model.layer(index), hidden, hidden)
        if progress is not None:
            progress("perplexity", (index + 1) / steps)
    total = 0.0
    for row, (_, scores) in zip(tokens.to(model.device), model.logits(hidden), strict=True):
        total += functional.cross_entropy(scores[:-1], row[1:], reduction="sum").item()
    if progress is not None:
        progress("perplexity", 1.0)
    return math.exp(total / tokens[:, 1:].numel())
