"""Moments and factor pairs of a whole model at once, as a reference for one layer at a time."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.weights import FactorPair
from runtime.models.registry import model_family
from runtime.offline.compress.decompose import Decomposition, decompose
from runtime.offline.compress.forward import forward_layer, logits, rope_rows
from runtime.offline.compress.methods import Method
from runtime.offline.compress.moments import LayerMoments
from runtime.offline.compress.ranks import Choice, allocate_ranks, uniform_ranks


def whole_model_moments(
    checkpoint: Checkpoint, tokens: Tensor, seed: int
) -> tuple[LayerMoments, ...]:
    """Return all moments from one autograd graph over all layers per row."""
    layout = model_family(checkpoint.config).layout(checkpoint.config)
    generator = torch.Generator().manual_seed(seed)
    moments = tuple(LayerMoments({}, {}) for _ in checkpoint.layers)
    rope = rope_rows(checkpoint.config, tokens.shape[1], checkpoint.embedding)
    for row in tokens:
        embedded = functional.embedding(row[None], checkpoint.embedding).requires_grad_()
        hidden = embedded
        for layer, found in zip(checkpoint.layers, moments, strict=True):

            def observe(name: str, x: Tensor, y: Tensor, found: LayerMoments = found) -> None:
                if layout.input_of(name) == name:
                    _add(found.inputs, name, x.detach())
                y.register_hook(partial(_add, found.gradients, name))  # type: ignore[no-untyped-call]

            hidden = forward_layer(checkpoint.config, layer, hidden, rope, observe)
        scores = logits(checkpoint, hidden)[0]
        cumulative = scores.detach().softmax(-1).cumsum(-1)
        points = torch.rand(len(scores), 1, generator=generator)
        drawn = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)[:, 0]
        loss = functional.cross_entropy(
            scores, drawn.clamp_max(len(scores[0]) - 1), reduction="sum"
        )
        torch.autograd.grad(loss, embedded)
    for found in moments:
        for matrix in (*found.inputs.values(), *found.gradients.values()):
            matrix.div_(tokens.numel())
    return moments


def whole_model_factors(
    checkpoint: Checkpoint, tokens: Tensor, keep: float, method: Method, multiple: int
) -> list[dict[str, FactorPair | None]]:
    """Return the factor pairs of each layer by field, rounded to bf16; None is dense.

    `method` is `FISHER` or `SVD_LLM`, with its default allocation.
    """
    layout = model_family(checkpoint.config).layout(checkpoint.config)
    found: list[tuple[int, str, Decomposition]] = []
    for index, moments in enumerate(whole_model_moments(checkpoint, tokens, seed=0)):
        for field in layout.linears:
            part = decompose(
                getattr(checkpoint.layers[index], field).weight,
                moments.inputs[layout.input_of(field)],
                moments.gradients[field] if method.uses_gradients else None,
                method.input_damping,
            )
            found.append((index, field, part))
    choices = [Choice(*part.shape, part.loss.numpy()) for *_, part in found]
    allocate = allocate_ranks if method is Method.FISHER else uniform_ranks
    layers: list[dict[str, FactorPair | None]] = [{} for _ in checkpoint.layers]
    for (index, field, part), rank in zip(found, allocate(choices, keep, multiple), strict=True):
        pair = None if rank is None else part.truncate(rank)
        layers[index][field] = pair and replace(
            pair, u=pair.u.bfloat16().float(), v=pair.v.bfloat16().float()
        )
    return layers


def _add(sums: dict[str, Tensor], name: str, vectors: Tensor) -> None:
    rows = vectors.flatten(0, -2)
    sums[name] = sums.get(name, 0) + rows.t() @ rows
