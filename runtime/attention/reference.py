"""Attention in plain torch for any device; it specifies the results of the other backends."""

import math

import torch
from torch import Tensor

from runtime.attention.base import Batch


class ReferenceAttention:
    """Reference backend of `runtime.attention.base.DenseAttention`.

    Args:
        window: number of last tokens that a token attends to, itself included; None: all. Pages
            without such tokens are not read.
    """

    name = "reference"
    version = 1

    def __init__(self, window: int | None = None) -> None:
        self._window = window

    def write(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
    ) -> Tensor:
        kv_heads, page_size, dim = k_pages.shape[1:]
        by_head = qkv.view(len(qkv), -1, dim)  # [n, heads + 2 kv_heads, dim]
        heads = by_head.shape[1] - 2 * kv_heads
        cos, sin = (table[batch.positions, None] for table in rope)  # [n, 1, dim / 2]
        first, second = by_head[:, : heads + kv_heads].float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        indices = batch.kv_indices()
        pages = batch.page_table[batch.sequences, indices // page_size].long()
        slots = indices % page_size
        k_pages[pages, :, slots] = rotated[:, heads:].to(k_pages.dtype)
        v_pages[pages, :, slots] = by_head[:, heads + kv_heads :].to(v_pages.dtype)
        return rotated[:, :heads].to(qkv.dtype)

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> Tensor:
        kv_heads, page_size, dim = k_pages.shape[1:]
        tokens, heads, _ = q.shape
        out = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
        for sequence, length in enumerate(lengths):
            rows = slice(starts[sequence], starts[sequence + 1])
            before = length - (rows.stop - rows.start)  # number of tokens before the new ones
            skipped = self._skipped(before) // page_size  # number of pages not attended to
            first = skipped * page_size
            pages = batch.page_table[sequence, skipped:].long()
            # [p, kv_head, slot, dim] -> [kv_head, t, dim], without slots beyond the length
            keys, values = (
                plane[pages].transpose(0, 1).flatten(1, 2)[:, : length - first].float()
                for plane in (k_pages, v_pages)
            )
            # n: new tokens, h: KV heads, g: query heads of a KV head, t: tokens, d: dim
            queries = q[rows].float().view(-1, kv_heads, heads // kv_heads, dim)
            scores = torch.einsum("nhgd,htd->hgnt", queries, keys) / math.sqrt(dim)
            indices = torch.arange(first, length, device=q.device)
            own = indices[before - first :, None]
            hidden = indices[None] > own
            if self._window is not None:
                hidden |= indices[None] <= own - self._window
            weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
            attended = torch.einsum("hgnt,htd->nhgd", weights, values)
            out[rows] = attended.reshape(-1, heads * dim).to(q.dtype)
        return out

    def _skipped(self, before: int) -> int:
        """Return the number of first tokens that no token after the first ``before`` attends to."""
        return 0 if self._window is None else max(0, before + 1 - self._window)
