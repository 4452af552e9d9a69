"""Run a model one layer at a time, with the activations of all rows in host memory.

The device holds the weights of one layer and the activations of one batch of rows, so it can be
much smaller than the model. All computation is in fp32.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.weights import Checkpoint, moved
from runtime.offline.compress.forward import (
    HeadObserver,
    Observer,
    embed,
    forward_layer,
    logits,
    mean_embedding,
    rope_rows,
)
from runtime.offline.compress.stopwatch import Stopwatch

_BATCH_TOKENS = 4096
"""Tokens that a GPU computes at once. The CPU computes single rows, which fit its caches better."""


class LayerwiseModel:
    """A checkpoint in host memory whose layers are computed on ``device`` one after another.

    Activations are fp32 ``[n, length, hidden]`` on the CPU, pinned if ``device`` is a GPU.

    Attributes:
        checkpoint: weights of any dtype, which may be memory-mapped.
        watch: time spent on "reading weights", "forward", "backward" and "head".
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.watch = Stopwatch(self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer for ``tokens`` ``[n, length]``."""
        device = self.checkpoint.embedding.device
        hidden = self.empty(tokens)
        for row, into in zip(tokens, hidden, strict=True):
            into.copy_(embed(self.checkpoint, row.to(device), torch.float32))
        return hidden

    def empty(self, tokens: Tensor) -> Tensor:
        """Return uninitialized activations for ``tokens`` ``[n, length]``."""
        return torch.empty(
            *tokens.shape,
            self.checkpoint.config.hidden_size,
            dtype=torch.float32,
            pin_memory=self.device.type == "cuda",
        )

    def layer(self, index: int) -> Any:
        """Return the weights of a layer on the device, in fp32."""
        with self.watch.measure("reading weights"):
            return moved(self.checkpoint.layers[index], self.device, torch.float32, {})

    @torch.no_grad()
    def forward(
        self,
        layer: Any,
        inputs: Tensor,
        outputs: Tensor,
        observe: Observer | None = None,
        observe_heads: HeadObserver | None = None,
    ) -> None:
        """Compute a layer for all rows.

        Args:
            layer: result of `layer`.
            inputs, outputs: activations; they may be the same tensor.
            observe: callback for every linear and batch, or None.
            observe_heads: callback for the input of attention of every batch, or None.
        """
        config = self.checkpoint.config
        with self.watch.measure("forward"):
            rope = self._rope(inputs)
            for rows in self._batches(inputs):
                hidden = self._on_device(inputs[rows])
                hidden = forward_layer(config, layer, hidden, rope, observe, observe_heads)
                outputs[rows].copy_(hidden, non_blocking=True)

    @torch.enable_grad()
    def backward(
        self, layer: Any, inputs: Tensor, gradients: Tensor, observe: Observer | None = None
    ) -> None:
        """Compute a layer again, then the gradient of its inputs.

        Args:
            layer, observe: as in `forward`; the outputs of linears require gradients.
            inputs: activations before the layer.
            gradients: gradient of the layer's outputs; overwritten with the gradient of its inputs.
        """
        with self.watch.measure("backward"):
            rope = self._rope(inputs)
            for rows in self._batches(inputs):
                x = self._on_device(inputs[rows]).requires_grad_()
                y = forward_layer(self.checkpoint.config, layer, x, rope, observe)
                (gradient,) = torch.autograd.grad(y, x, self._on_device(gradients[rows]))
                gradients[rows].copy_(gradient, non_blocking=True)

    def logits(self, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(x, logits)`` for each row of the last layer's output.

        Both are on the device: x ``[1, length, hidden]`` is a leaf tensor, and the logits
        ``[length, vocab]`` are computed from it, with gradients if these are enabled.
        """
        checkpoint = self.checkpoint
        with self.watch.measure("reading weights"):
            names = ("final_norm", "final_norm_bias", "lm_head")
            weights = {
                name: moved(getattr(checkpoint, name), self.device, torch.float32, {})
                for name in names
            }
            head = replace(checkpoint, **weights)
        for row in hidden:
            with self.watch.measure("head"):  # includes what the caller computes from the logits
                x = self._on_device(row[None]).requires_grad_(torch.is_grad_enabled())
                yield x, logits(head, x)[0]

    def embeddings(self, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(x, embedding)`` for each row of an encoder's last layer, as `logits` does.

        The embeddings are `mean_embedding`, ``[hidden]``.
        """
        for row in hidden:
            with self.watch.measure("head"):
                x = self._on_device(row[None]).requires_grad_(torch.is_grad_enabled())
                yield x, mean_embedding(x)[0]

    def _batches(self, activations: Tensor) -> Iterator[slice]:
        count, length, _ = activations.shape
        rows = 1 if self.device.type == "cpu" else max(1, _BATCH_TOKENS // length)
        return (slice(first, first + rows) for first in range(0, count, rows))

    def _on_device(self, activations: Tensor) -> Tensor:
        return activations.to(self.device, non_blocking=True)

    def _rope(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, device=self.device)
        return rope_rows(self.checkpoint.config, activations.shape[1], like)
