"""Second moments of q, k and v over calibration text, from which KV formats are calibrated."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from runtime.checkpoint.weights import Checkpoint
from runtime.kv.calibration import KVMoments
from runtime.kv.calibration.moments import SKIPPED
from runtime.kv.rotation import PageRotation
from runtime.offline.compress.layerwise import LayerwiseModel


def kv_moments(
    checkpoint: Checkpoint,
    tokens: Tensor,
    device: torch.device | str = "cpu",
    progress: Callable[[float], None] = lambda _: None,
    min_value_samples: int = 0,
    min_sample_pages: int = 0,
) -> Iterator[KVMoments]:
    """Compute the layers one after another, in fp32, and yield the moments of each.

    Args:
        tokens: int64 ``[n, length]``. Each row is a text that starts at position 0.
        device: device of the computation and of the moments. It holds one layer at a time.
        progress: called with the fraction of the layers that are done.
        min_value_samples: minimum number of tokens of each layer whose V is kept, if ``tokens`` has
            as many.
        min_sample_pages: minimum number of pages of each layer that are kept, if ``tokens`` has as
            many.
    """
    model = LayerwiseModel(checkpoint, device)
    rotation = PageRotation(checkpoint.config, device)
    hidden = model.embed(tokens)
    count = checkpoint.config.num_layers
    measured = tokens.shape[0] * max(0, tokens.shape[1] - SKIPPED)
    sample_every = max(1, measured // min_value_samples) if min_value_samples else 0
    pages = measured // SKIPPED
    page_every = max(1, pages // min_sample_pages) if min_sample_pages else 0
    for index in range(count):
        moments = KVMoments.of(checkpoint.config, device, sample_every, page_every)

        def add(q: Tensor, k: Tensor, v: Tensor, into: KVMoments = moments) -> None:
            into.add(q, k, v, rotation)

        model.forward(model.layer(index), hidden, hidden, observe_heads=add)
        progress((index + 1) / count)
        yield moments
