"""Attention that reads K and V as if a sequence had been decoded with a compressed KV format.

A whole text is computed in one forward pass. The query at position p reads what a decode step reads
at that position: exact K and V, except for the pages that are stored when the sequence has p + 1
tokens. K and V of a layer come from hidden states that carry the errors of all lower layers.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig
from runtime.errors import KVFormatError
from runtime.kv.compressed import CompressedFormat, CompressedLayer
from runtime.kv.dense import DenseLayer
from runtime.kv.format import KVFormat, Plane
from runtime.kv.windowed import compressed_cache
from runtime.pages.window import SINK_PAGES, first_recent

_POISON = 255
"""Byte that fills stored planes before they are written. Floating-point planes read it as NaN."""


def stored_pages(length: int, page_size: int, *, window: bool) -> range:
    """Return the pages of a sequence of ``length`` tokens that are stored in the compressed format.

    Args:
        window: whether the sinks and the window of recent tokens stay exact. Without them, only the
            tokens of an incomplete last page are exact.
    """
    if window:
        return range(SINK_PAGES, first_recent(length, page_size))
    return range(length // page_size)


def blocks(
    positions: Sequence[int], page_size: int, *, window: bool
) -> Iterator[tuple[slice, range]]:
    """Yield slices of consecutive rows that attend to the same stored pages, and these pages.

    Args:
        positions: ascending positions of the rows.
    """
    rows = groupby(
        range(len(positions)),
        key=lambda row: stored_pages(positions[row] + 1, page_size, window=window),
    )
    for stored, block in rows:
        first, *rest = block
        yield slice(first, (rest[-1] if rest else first) + 1), stored


class TeacherForced(KVFormat):
    """KV format that evaluates a `CompressedFormat` in one forward pass over a whole text.

    It is for models built without `runtime.gemm`. The planes are those of format `dense` and hold
    exact K and V. A batch must be one sequence. Its earlier tokens, if any, must be in the planes
    as exact K and V.

    Args:
        compressed: format to evaluate; None to attend to exact K and V only. The order of summation
            is the same, so that a lossless format has bitwise the same results as None.
        window: see `stored_pages`.
    """

    name = "teacher-forced"
    version = 1
    kernels = "teacher-forced-1"

    def __init__(
        self, config: ModelConfig, compressed: CompressedFormat | None, *, window: bool = True
    ) -> None:
        self._config = config
        self._compressed = compressed
        self._window = window

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        shape = (self._config.num_kv_heads, page_size, self._config.head_dim)
        return Plane("k", torch.bfloat16, shape), Plane("v", torch.bfloat16, shape)

    def layer(self, index: int) -> "TeacherForcedLayer":
        return TeacherForcedLayer(self._compressed, index, window=self._window)


class TeacherForcedLayer(DenseLayer):
    """One layer of `TeacherForced`; it writes K and V as format `dense` does."""

    def __init__(self, compressed: CompressedFormat | None, index: int, *, window: bool) -> None:
        super().__init__(ReferenceAttention())
        self._compressed = compressed
        self._index = index
        self._window = window

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """Return the attention of every query over stored and exact pages, `[n, heads * dim]`.

        The batch may be split into sequences of one token, as the last layer does for its logits.

        Raises:
            KVFormatError: the format decodes tensors of a wrong shape, or values that are not
                finite.
        """
        page_size = planes[0].shape[2]
        positions = batch.kv_indices()  # without evicted tokens
        exact = [plane[batch.page_table[0].long()] for plane in planes]  # [p, kv_head, slot, dim]
        keys, values = (_by_token(pages) for pages in exact)  # [kv_head, length, dim]
        last = stored_pages(int(positions[-1]) + 1, page_size, window=self._window)
        decoded = self._decoded(exact[0], exact[1], last)
        done = offset = last.start * page_size  # tokens before `done` have the values to read
        out = torch.empty(len(q), q[0].numel(), dtype=q.dtype, device=q.device)
        for rows, stored in blocks(positions.tolist(), page_size, window=self._window):
            end = stored.stop * page_size
            if decoded is not None and end > done:
                keys[:, done:end] = decoded[0][:, done - offset : end - offset]
                values[:, done:end] = decoded[1][:, done - offset : end - offset]
                done = end
            out[rows] = _causal(q[rows], keys, values, positions[rows])
        return out

    def _decoded(self, keys: Tensor, values: Tensor, stored: range) -> tuple[Tensor, Tensor] | None:
        """Encode pages and decode them again.

        Args:
            keys, values: bf16 `[p, kv_heads, page_size, dim]`, exact pages of the sequence.
            stored: pages to encode.

        Returns:
            K and V, fp32 `[kv_heads, tokens, dim]`, or None if there is nothing to encode.
        """
        if self._compressed is None or not stored:
            return None
        size = keys.shape[2]
        first = torch.tensor([page * size for page in stored], device=keys.device)
        pages = keys[stored.start : stored.stop], values[stored.start : stored.stop]
        decoded = round_trip(self._compressed, self._index, *pages, first)
        return _by_token(decoded[0]), _by_token(decoded[1])


def round_trip(
    compressed: CompressedFormat,
    index: int,
    keys: Tensor,
    values: Tensor,
    first_positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Encode pages of layer ``index`` and decode them again; see `CompressedLayer`.

    Raises:
        KVFormatError: `decode` returns tensors of a wrong shape, or values that are not finite.
    """
    layer = compressed.layer(index)
    count = len(keys)
    size = keys.shape[2]
    cache = compressed_cache(compressed.planes(index, size), count, keys.device)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).fill_(_POISON)
    planes = cache.layer(0)
    # Reversed, because a format must not assume that page ids follow the order of tokens.
    ids = torch.arange(count, device=keys.device).flip(0)
    layer.encode(keys, values, first_positions, planes, ids)
    decoded = layer.decode(planes, ids, first_positions)
    for part, of in zip(decoded, (keys, values), strict=True):
        if part.shape != of.shape or not part.isfinite().all():
            raise KVFormatError(
                f"format {compressed.name}, layer {index}: decode() returned "
                f"{list(part.shape)} for {list(of.shape)}, or values that are not finite"
            )
    return decoded


class RoundTrip(CompressedFormat):
    """Compressed format whose stored pages hold the decoded values of another format, in fp32.

    Results equal those of the other format, but each page is decoded only once.
    """

    version = 1

    def __init__(self, compressed: CompressedFormat, config: ModelConfig) -> None:
        self._compressed = compressed
        self._config = config
        self.name = compressed.name

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        shape = (self._config.num_kv_heads, page_size, self._config.head_dim)
        return Plane("k", torch.float32, shape), Plane("v", torch.float32, shape)

    def layer(self, index: int) -> "RoundTripLayer":
        return RoundTripLayer(self._compressed, index)


class RoundTripLayer(CompressedLayer):
    """One layer of `RoundTrip`."""

    def __init__(self, compressed: CompressedFormat, index: int) -> None:
        self._compressed = compressed
        self._index = index

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        decoded = round_trip(self._compressed, self._index, keys, values, first_positions)
        for plane, part in zip(planes, decoded, strict=True):
            plane[targets] = part

    def decode(
        self,
        planes: tuple[Tensor, ...],
        pages: Tensor,
        first_positions: Tensor,  # noqa: ARG002 - K is after RoPE
    ) -> tuple[Tensor, Tensor]:
        keys, values = (plane[pages] for plane in planes)
        return keys, values


def _causal(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Return causal attention, `[n, heads * dim]`.

    Args:
        q: `[n, heads, dim]`.
        keys, values: fp32 `[kv_heads, length, dim]`.
        positions: int64 `[n]`, ascending.
    """
    count, heads, dim = q.shape
    kv_heads = len(keys)
    group = heads // len(keys)
    end = int(positions[-1]) + 1
    # [n, kv_head * group, dim] -> [kv_head, group * n, dim]
    queries = q.float().view(count, kv_heads, group, dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = queries @ keys[:, :end].mT / math.sqrt(dim)
    later = torch.arange(end, device=q.device) > positions[:, None]  # [n, end]
    by_query = scores.view(kv_heads, group, count, end).masked_fill_(later, -math.inf)
    weights = by_query.softmax(dim=-1).flatten(1, 2)  # [kv_head, group * n, end]
    attended = (weights @ values[:, :end]).view(kv_heads, group, count, dim)
    return attended.permute(2, 0, 1, 3).reshape(count, heads * dim).to(q.dtype)


def _by_token(pages: Tensor) -> Tensor:
    """Return `[p, kv_heads, slot, dim]` as fp32 `[kv_heads, p * slot, dim]`, in new memory."""
    return pages.transpose(0, 1).flatten(1, 2).to(torch.float32, copy=True)
