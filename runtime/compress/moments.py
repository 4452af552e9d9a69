"""Second moments over calibration text: how strongly each direction of a projection is used.

Of a projection ``y = W x``, ``C = E[x xᵀ]`` tells which inputs occur (SVD-LLM's whitening), and
``G = E[g gᵀ]``, g the gradient of the loss with respect to y, which outputs matter. The change of
the loss by ``ΔW`` is then about ``½ tr(G ΔW C ΔWᵀ)`` per token: the Kronecker-factored Fisher
approximation (K-FAC, arXiv 1503.05671, section 3). The loss is that of tokens drawn from the
model's own distribution, as the Fisher information is defined, not of the text's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import Checkpoint
from runtime.compress.forward import Observer, forward_layer, logits, rope_rows
from runtime.compress.perplexity import Progress

INPUT_OF = {
    "q": "q",
    "k": "q",
    "v": "q",
    "o": "o",
    "gate": "gate",
    "up": "gate",
    "down": "down",
}
"""The projection under whose name the input of each projection is kept: q, k, v share one."""


@dataclass(frozen=True)
class LayerMoments:
    """Means over tokens, fp32: ``inputs`` ``[in, in]`` by the values of `INPUT_OF`, ``gradients``
    ``[out, out]`` by projection, if they were asked for."""

    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def collect_moments(
    checkpoint: Checkpoint,
    tokens: Tensor,
    seed: int,
    progress: Progress | None = None,
    *,
    gradients: bool = True,
) -> tuple[LayerMoments, ...]:
    """Moments of every layer over ``tokens`` ``[n, length]``, one forward and backward a row, or
    those of the inputs alone, without the backward pass.

    They take ``Σ in² + Σ out²`` floats: 0.7 times the fp32 projections for SmolLM2, and more for
    wider models.
    """
    config = checkpoint.config
    device = checkpoint.embedding.device
    generator = torch.Generator(device).manual_seed(seed)
    moments = tuple(LayerMoments({}, {}) for _ in checkpoint.layers)
    observers = [_accumulate(layer) for layer in moments]
    rope = rope_rows(config, tokens.shape[1], checkpoint.embedding)
    for done, row in enumerate(tokens.to(device)):
        with torch.set_grad_enabled(gradients):
            embedded = functional.embedding(row[None], checkpoint.embedding)
            hidden = embedded.requires_grad_(gradients)
            for layer, observe in zip(checkpoint.layers, observers, strict=True):
                hidden = forward_layer(config, layer, hidden, rope, observe)
            if gradients:
                predicted = logits(checkpoint, hidden)[0].float()
                drawn = _draw(predicted.detach(), generator)
                loss = functional.cross_entropy(predicted, drawn, reduction="sum")
                torch.autograd.grad(loss, embedded)
        if progress is not None:
            progress("calibrating", (done + 1) / tokens.shape[0])
    for moment in moments:
        for matrix in (*moment.inputs.values(), *moment.gradients.values()):
            matrix.div_(tokens.numel())
    return moments


def _draw(scores: Tensor, generator: torch.Generator) -> Tensor:
    """One token ``[n]`` from the distribution of each row of logits ``[n, vocab]``.

    Through the cumulative distribution: one random number a row instead of one a token.
    """
    cumulative = scores.softmax(-1).cumsum(-1)
    points = torch.rand(len(scores), 1, generator=generator, device=scores.device)
    drawn = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return drawn[:, 0].clamp_max(scores.shape[1] - 1)


def _accumulate(layer: LayerMoments) -> Observer:
    def observe(projection: str, x: Tensor, y: Tensor) -> None:
        if INPUT_OF[projection] == projection:
            _add(layer.inputs, projection, x.detach())
        if y.requires_grad:
            add: Callable[[Tensor], None] = partial(_add, layer.gradients, projection)
            y.register_hook(add)  # type: ignore[no-untyped-call]

    return observe


def _add(sums: dict[str, Tensor], name: str, vectors: Tensor) -> None:
    """Add ``Σ v vᵀ`` over ``[..., dim]``."""
    rows = vectors.flatten(0, -2).float()
    if name not in sums:
        sums[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
    sums[name].addmm_(rows.t(), rows)
