"""Second moments of the inputs and output gradients of linears over calibration text.

For a linear ``y = W x``, ``C = E[x xᵀ]`` measures its inputs (SVD-LLM's whitening).
``G = E[g gᵀ]``, with g the gradient of the loss with respect to y, measures its outputs. A change
``ΔW`` changes the loss by about ``½ tr(G ΔW C ΔWᵀ)`` per token: the Kronecker-factored Fisher
approximation (K-FAC, arXiv 1503.05671, section 3). The loss is that of tokens drawn from the
model's own distribution, as in the definition of the Fisher information, not that of the text. For
an encoder, that distribution is normal around the embedding e: the gradient is that of ``e · ε``
with a random normal ε, so that the moments are those of the Gauss-Newton matrix.

Moments are collected one layer at a time. Input moments need one pass forward, which keeps the
input of one layer: ``4 · tokens · hidden`` bytes of host memory. Gradients need a pass forward that
keeps the inputs of all layers, ``4 · layers · tokens · hidden`` bytes, and a pass backward in which
each layer is computed again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.family import LayerLayout
from runtime.models.registry import model_family
from runtime.offline.compress.forward import Observer
from runtime.offline.compress.layerwise import LayerwiseModel


@dataclass(frozen=True)
class LayerMoments:
    """Second moments of one layer: fp32 means over tokens.

    Attributes:
        inputs: ``[in, in]`` for each distinct input, by the first linear that reads it
            (`LayerLayout.input_of`).
        gradients: by linear, ``[out, out]`` or, for FWSVD, the importance of each row ``[out]``;
            empty unless requested.
    """

    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class CalibratedLayers:
    """Consecutive layers and their moments, on the device of the model.

    Attributes:
        layers: indices of the layers.
        weights: fp32 weights of each layer.
        moments: moments of each layer.
        carry: activations from which the next layers can be calibrated.
    """

    layers: range
    weights: tuple[Any, ...]
    moments: tuple[LayerMoments, ...]
    carry: Tensor


def forward_moments(
    model: LayerwiseModel, tokens: Tensor, blocks: Sequence[range], carry: Tensor | None = None
) -> Iterator[CalibratedLayers]:
    """Yield the input moments of blocks of layers, from the first to the last.

    Args:
        tokens: int64 ``[n, length]``.
        blocks: consecutive layers; those of one block are yielded together.
        carry: `CalibratedLayers.carry` of the layers before ``blocks``; None if ``blocks`` start
            with layer 0. It is modified.
    """
    layout = _layout(model)
    hidden = carry
    for block in blocks:
        if hidden is None:
            hidden = model.embed(tokens)
        weights, moments = [], []
        for index in block:
            layer = model.layer(index)
            found = LayerMoments({}, {})
            model.forward(layer, hidden, hidden, _accumulate(found, layout))
            weights.append(layer)
            moments.append(_mean(found, tokens))
        yield CalibratedLayers(block, tuple(weights), tuple(moments), hidden)
        del layer, found, weights, moments  # free the device before the next block


def backward_moments(
    model: LayerwiseModel,
    tokens: Tensor,
    layers: range,
    seed: int,
    carry: Tensor | None = None,
    progress: Callable[[float], None] = lambda _: None,
    *,
    by_row: bool = False,
) -> Iterator[CalibratedLayers]:
    """Yield the moments of inputs and gradients of ``layers``, from the last to the first.

    Args:
        tokens: int64 ``[n, length]``.
        layers: layers to calibrate, which start with layer 0.
        seed: seed of the tokens whose loss is differentiated.
        carry: `CalibratedLayers.carry` of the layer after ``layers``; None if ``layers`` are all
            layers. It is modified.
        progress: called with the fraction of the forward pass that is done.
        by_row: whether the gradients are the importance of each row: the sum over its weights of
            their squared gradients, each summed over the tokens of a text (FWSVD, arXiv
            2207.00112, section 4).
    """
    if not layers:
        return
    layout = _layout(model)
    inputs = [model.embed(tokens)]
    # With a carry, the output of the last layer is not needed.
    for index in layers if carry is None else layers[:-1]:
        inputs.append(model.empty(tokens))
        model.forward(model.layer(index), inputs[-2], inputs[-1])
        progress(len(inputs) / (len(layers) + 1))
    gradients = _loss_gradients(model, inputs.pop(), seed) if carry is None else carry
    for index in reversed(layers):
        layer = model.layer(index)
        found = LayerMoments({}, {})
        observe = _accumulate(found, layout, by_row=by_row)
        model.backward(layer, inputs.pop(), gradients, observe)
        block = range(index, index + 1)
        yield CalibratedLayers(block, (layer,), (_mean(found, tokens),), gradients)
        del layer, found  # free the device before the next layer


@torch.enable_grad()
def _loss_gradients(model: LayerwiseModel, hidden: Tensor, seed: int) -> Tensor:
    """Replace the output of the last layer by the gradient of the loss, and return it."""
    generator = torch.Generator().manual_seed(seed)
    encoder = model_family(model.checkpoint.config).encoder
    outputs = model.embeddings(hidden) if encoder else model.logits(hidden)
    for row, (x, scores) in zip(hidden, outputs, strict=True):
        if encoder:
            loss = scores @ torch.randn(len(scores), generator=generator).to(scores.device)
        else:
            drawn = _draw(scores.detach(), generator)
            loss = functional.cross_entropy(scores, drawn, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x)
        row.copy_(gradient[0], non_blocking=True)
    return hidden


def _draw(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token per row of logits ``[n, vocab]``; return ``[n]``.

    Inverts the cumulative distribution, which takes one random number per row instead of one per
    vocabulary entry. Random numbers are generated on the CPU, and are the same for every device.
    """
    cumulative = scores.softmax(-1).cumsum(-1)
    points = torch.rand(len(scores), 1, generator=generator).to(scores.device)
    drawn = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return drawn[:, 0].clamp_max(scores.shape[1] - 1)


def _layout(model: LayerwiseModel) -> LayerLayout:
    config = model.checkpoint.config
    return model_family(config).layout(config)


def _accumulate(layer: LayerMoments, layout: LayerLayout, *, by_row: bool = False) -> Observer:
    """Return an observer that adds the inputs and output gradients of a layer to its moments."""

    def observe(linear: str, x: Tensor, y: Tensor) -> None:
        if layout.input_of(linear) == linear:
            _add(layer.inputs, linear, x.detach())
        if y.requires_grad and by_row:
            add_rows = partial(_add_rows, layer.gradients, linear, x.detach())
            y.register_hook(add_rows)  # type: ignore[no-untyped-call]
        elif y.requires_grad:
            add: Callable[[Tensor], None] = partial(_add, layer.gradients, linear)
            y.register_hook(add)  # type: ignore[no-untyped-call]

    return observe


def _add(sums: dict[str, Tensor], name: str, vectors: Tensor) -> None:
    """Add ``Σ v vᵀ`` over vectors ``[..., dim]`` to ``sums[name]``."""
    rows = vectors.flatten(0, -2)
    if name not in sums:
        sums[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
    sums[name].addmm_(rows.t(), rows)


def _add_rows(sums: dict[str, Tensor], name: str, x: Tensor, gradient: Tensor) -> None:
    """Add the importance of each row of a weight to ``sums[name]``.

    Args:
        x, gradient: input and output gradient of the linear, ``[batch, length, dim]``.
    """
    importance = (gradient.transpose(1, 2) @ x).square().sum((0, 2))
    sums[name] = sums[name] + importance if name in sums else importance


def _mean(sums: LayerMoments, tokens: Tensor) -> LayerMoments:
    for matrix in (*sums.inputs.values(), *sums.gradients.values()):
        matrix.div_(tokens.numel())
    return sums
