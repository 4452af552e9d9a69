"""Decoder layers over a step's matrices: the same tensors for prefill and large batches."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runtime.layers.decoder import LayerParts
from runtime.layers.pointwise import RmsNorm
from runtime.step.weights import GROUPS, LayerMatrices, StepWeights, by_halves


class StepProjection:
    """A group's projections as torch computes them: `[n, in]` to `[n, sum(out)]`; q, k and v with
    their rows as `by_halves` has them."""

    def __init__(self, weights: StepWeights, layer: LayerMatrices, names: Sequence[str]) -> None:
        self._outer = [layer.outer[name] for name in names]
        self._inner = layer.inner[names[0]].weight if names[0] in layer.inner else None
        self._whole = layer.stacked.get(names[0])
        self._bias = self._biases(weights, names)

    def __call__(self, x: Tensor) -> Tensor:
        if self._whole is not None:
            return functional.linear(x, self._whole, self._bias)
        inner = x if self._inner is None else functional.linear(x, self._inner)
        parts = []
        for matrix in self._outer:
            own = x
            if matrix.first >= 0:
                own = inner[:, matrix.first : matrix.first + matrix.weight.shape[1]]
            parts.append(functional.linear(own, matrix.weight))
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return y if self._bias is None else y.add_(self._bias)

    def _biases(self, weights: StepWeights, names: Sequence[str]) -> Tensor | None:
        if all(matrix.bias < 0 for matrix in self._outer):
            return None
        found = []
        for name, matrix in zip(names, self._outer, strict=True):
            rows = len(matrix.weight)
            bias = weights.vectors.new_zeros(rows)
            if matrix.bias >= 0:
                bias = weights.vectors[matrix.bias : matrix.bias + rows]
            dim = weights.config.head_dim
            found.append(by_halves(bias, dim) if name in GROUPS[0] else bias)
        return torch.cat(found).to(self._outer[0].weight.dtype)


def parts_of(weights: StepWeights, layer: LayerMatrices) -> LayerParts:
    """A layer of a model over a step's weights."""

    def norm(first: int) -> RmsNorm:
        values = weights.vectors[first : first + weights.config.hidden_size]
        return RmsNorm(values.to(weights.embedding.dtype), weights.config.rms_norm_eps)

    qkv, o, gate_up, down = (StepProjection(weights, layer, names) for names in GROUPS)
    return LayerParts(
        input_norm=norm(layer.input_norm),
        post_norm=norm(layer.post_norm),
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        factorized=bool(layer.inner),
    )
