"""Similarity of the embeddings of a factorized encoder to those of the dense one."""

import torch
from torch import Tensor

from runtime.checkpoint.weights import Checkpoint
from runtime.errors import CompressionError
from runtime.offline.compress.layerwise import LayerwiseModel
from runtime.offline.compress.perplexity import Progress


@torch.inference_mode()
def embeddings(
    checkpoint: Checkpoint,
    tokens: Tensor,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the `mean_embedding` of each row, fp32 ``[n, hidden]`` on the CPU.

    Layers are computed one after another for all rows, in fp32.

    Args:
        tokens: int64 ``[n, length]``, complete with special tokens.
        device: device of the computation. It holds one layer at a time.

    Raises:
        CompressionError: there are no tokens.
    """
    if tokens.ndim != 2 or not tokens.numel():
        raise CompressionError(f"embeddings need [n, length] tokens, not {list(tokens.shape)}")
    model = LayerwiseModel(checkpoint, device)
    hidden = model.embed(tokens)
    count = checkpoint.config.num_layers
    for index in range(count):
        model.forward(model.layer(index), hidden, hidden)
        if progress is not None:
            progress("embeddings", (index + 1) / count)
    return torch.stack([embedding.cpu() for _, embedding in model.embeddings(hidden)])


def similarity(first: Tensor, second: Tensor) -> float:
    """Return the mean cosine similarity of the rows of two tensors ``[n, hidden]``."""
    return float(torch.cosine_similarity(first.double(), second.double()).mean())
