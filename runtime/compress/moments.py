"""Second moments of the inputs and output gradients of linears over calibration text.

For a linear ``y = W x``, ``C = E[x xᵀ]`` measures its inputs (SVD-LLM's whitening).
``G = E[g gᵀ]``, with g the gradient of the loss with respect to y, measures its outputs. A change
``ΔW`` changes the loss by about ``½ tr(G ΔW C ΔWᵀ)`` per token: the Kronecker-factored Fisher
approximation (K-FAC, arXiv 1503.05671, section 3). The loss is that of tokens drawn from the
model's own distribution, as in the definition of the Fisher information, not that of the text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.family import LayerLayout
from runtime.checkpoint.weights import Checkpoint
from runtime.compress.forward import Observer, forward_layer, logits, rope_rows
from runtime.compress.perplexity import Progress
from runtime.models.registry import model_family


@dataclass(frozen=True)
class LayerMoments:
    """Second moments of one layer: fp32 means over tokens.

    Attributes:
        inputs: ``[in, in]`` for each distinct input, by the first linear that reads it
            (`LayerLayout.input_of`).
        gradients: ``[out, out]`` by linear; empty unless requested.
    """

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
    """Return the moments of every layer over ``tokens`` ``[n, length]``.

    Runs one forward pass per row, and one backward pass if ``gradients``. The moments take ``Σ in²
    + Σ out²`` floats. For SmolLM2 this is 0.7 times the memory of its fp32 linears; for wider
    models it is more.
    """
    config = checkpoint.config
    device = checkpoint.embedding.device
    layout = model_family(config).layout(config)
    generator = torch.Generator(device).manual_seed(seed)
    moments = tuple(LayerMoments({}, {}) for _ in checkpoint.layers)
    observers = [_accumulate(layer, layout) for layer in moments]
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
    """Draw one token per row of logits ``[n, vocab]``; return ``[n]``.

    Inverts the cumulative distribution, which takes one random number per row instead of one per
    vocabulary entry.
    """
    cumulative = scores.softmax(-1).cumsum(-1)
    points = torch.rand(len(scores), 1, generator=generator, device=scores.device)
    drawn = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return drawn[:, 0].clamp_max(scores.shape[1] - 1)


def _accumulate(layer: LayerMoments, layout: LayerLayout) -> Observer:
    """Return an observer that adds the inputs and output gradients of a layer to its moments."""

    def observe(linear: str, x: Tensor, y: Tensor) -> None:
        if layout.input_of(linear) == linear:
            _add(layer.inputs, linear, x.detach())
        if y.requires_grad:
            add: Callable[[Tensor], None] = partial(_add, layer.gradients, linear)
            y.register_hook(add)  # type: ignore[no-untyped-call]

    return observe


def _add(sums: dict[str, Tensor], name: str, vectors: Tensor) -> None:
    """Add ``Σ v vᵀ`` over vectors ``[..., dim]`` to ``sums[name]``."""
    rows = vectors.flatten(0, -2).float()
    if name not in sums:
        sums[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
    sums[name].addmm_(rows.t(), rows)
