"""From the hidden states of tokens to one embedding for each input."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.encoder import loops
from runtime.encoder.batch import RaggedBatch
from runtime.encoder.modules import DenseModule, EmbeddingModules, Normalize, Pooling
from runtime.layers.linear import linear_op

Head = Callable[[Tensor, RaggedBatch], Tensor]
"""From hidden states `[n, hidden]` to the result, `[s, dimension]`."""
_LEAST_NORM = 1e-12


def embedding_head(modules: EmbeddingModules, device: torch.device) -> Head:
    """Return the modules after the transformer, computed in fp32."""
    steps = [_step(step, device) for step in modules.steps]

    def head(hidden: Tensor, batch: RaggedBatch) -> Tensor:
        pooled = [pool(mode, hidden, batch) for mode in modules.pooling]
        x = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        for step in steps:
            x = step(x)
        return x

    return head


def pool(mode: Pooling, hidden: Tensor, batch: RaggedBatch) -> Tensor:
    """Return one vector for each input, fp32 `[s, hidden]`.

    Args:
        hidden: `[n, hidden]`.
    """
    starts = batch.starts.long()
    if mode is Pooling.CLS:
        return hidden[starts[:-1]].float()
    if mode is Pooling.LAST_TOKEN:
        return hidden[starts[1:] - 1].float()
    if mode is Pooling.MAX:
        return torch.segment_reduce(hidden.float(), "max", offsets=starts)
    root = mode is Pooling.MEAN_SQRT_LEN
    if hidden.device.type == "cpu":
        out = torch.empty(len(batch.lengths), hidden.shape[1])
        loops.mean(hidden.float().numpy(), batch.starts.numpy(), root, out.numpy())
        return out
    mean = torch.segment_reduce(hidden.float(), "mean", offsets=starts)
    return mean * starts.diff().sqrt()[:, None] if root else mean


def normalized(x: Tensor) -> Tensor:
    """Divide each row of fp32 `[n, d]` by its Euclidean norm. On the CPU, ``x`` is overwritten."""
    if x.device.type != "cpu":
        return functional.normalize(x, eps=_LEAST_NORM)
    x = x.contiguous()
    loops.normalize(x.numpy(), np.float32(_LEAST_NORM))
    return x


def _step(step: DenseModule | Normalize, device: torch.device) -> Callable[[Tensor], Tensor]:
    if isinstance(step, Normalize):
        return normalized
    weight = step.weight.to(device, torch.float32)
    bias = None if step.bias is None else step.bias.to(device, torch.float32)
    linear = linear_op(weight, bias)
    return (lambda x: torch.tanh(linear(x))) if step.tanh else linear
