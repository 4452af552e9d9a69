"""Decoding token by token with stored pages, as a naive loop: the reference of `TeacherForced`."""

import math

import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.attention.reference import ReferenceAttention
from runtime.kv.compressed import CompressedFormat
from runtime.kv.format import KVFormat, Plane
from runtime.models.model import Model
from runtime.pages.plan import PageCount

PAGE, SINK_TOKENS, WINDOW_TOKENS = 16, 16, 64


class Stepwise(KVFormat):
    """KV format of one sequence that encodes each page in the step in which it leaves the window.

    The exact page is then overwritten with NaN. Pages are encoded one at a time, and each stored
    page is decoded again in each step.
    """

    name, version, artifact_hash, kernels = "test-stepwise", 1, "", "test"
    graph_safe = dense_bf16 = False

    def __init__(self, compressed: CompressedFormat, planes: tuple[Plane, ...], *, window: bool):
        self.compressed = compressed
        self._planes = planes
        self.window = window
        self.pools: dict[int, tuple[Tensor, ...]] = {}
        self.stored: dict[int, dict[int, int]] = {}  # by layer: page of the sequence -> stored page

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        return self._planes

    def layer(self, index: int) -> "StepwiseLayer":
        return StepwiseLayer(self, index)


class StepwiseLayer:
    def __init__(self, parent: Stepwise, index: int) -> None:
        self.parent = parent
        self.index = index
        self.compressed = parent.compressed.layer(index)
        self.stored = parent.stored.setdefault(index, {})
        self.pool = parent.pools.setdefault(
            index,
            tuple(
                torch.zeros(40, *plane.shape, dtype=plane.dtype)
                for plane in parent.compressed.planes(index, PAGE)
            ),
        )

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        return ReferenceAttention().write(qkv, rope, planes[0], planes[1], batch)

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        length = int(batch.positions[0]) + 1
        for page in range(length // PAGE):
            if page not in self.stored and self._leaves(page, length):
                self._encode(page, planes)
        tokens = [self._token(position, planes) for position in range(length)]
        keys, values = (torch.stack(each, dim=1) for each in zip(*tokens, strict=True))
        out = torch.empty_like(q)
        group = q.shape[1] // keys.shape[0]
        for head in range(q.shape[1]):
            weights = (keys[head // group] @ q[0, head] / math.sqrt(q.shape[2])).softmax(0)
            out[0, head] = weights @ values[head // group]
        return out.flatten(1)

    def _leaves(self, page: int, length: int) -> bool:
        """Return whether no token of a page is a sink or one of the recent tokens."""
        first, end = page * PAGE, (page + 1) * PAGE
        if not self.parent.window:
            return end <= length
        return first >= SINK_TOKENS and end <= length - WINDOW_TOKENS

    def _encode(self, page: int, planes: tuple[Tensor, ...]) -> None:
        target = (7 * len(self.stored) + 3) % 40
        keys, values = (plane[page][None] for plane in planes)
        first = torch.tensor([page * PAGE])
        self.compressed.encode(keys, values, first, self.pool, torch.tensor([target]))
        self.stored[page] = target
        for plane in planes:
            plane[page] = math.nan

    def _token(self, position: int, planes: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        page, slot = divmod(position, PAGE)
        if page not in self.stored:
            return planes[0][page, :, slot].float(), planes[1][page, :, slot].float()
        ids, first = torch.tensor([self.stored[page]]), torch.tensor([page * PAGE])
        keys, values = self.compressed.decode(self.pool, ids, first)
        return keys[0, :, slot], values[0, :, slot]


def stepwise_logits(
    model: Model, tokens: list[int], compressed: CompressedFormat, *, window: bool
) -> Tensor:
    """Return the logits after each token, fp32 `[n, vocab]`."""
    model.kv_format = Stepwise(compressed, model.kv_format.planes(0, PAGE), window=window)
    pages = list(range(len(tokens) // PAGE + 1))
    cache = model.new_cache(PageCount(len(pages)))
    steps = [
        Batch.of([SequenceSlice([token], position, pages)]) for position, token in enumerate(tokens)
    ]
    return torch.cat([model.forward(batch, cache) for batch in steps])
