"""Writes and reads of latents in plain torch; the reference of the Triton kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.kv.lowrank.factors import Factor, LayerFactors
from runtime.kv.rotation import PageRotation
from runtime.layers.linear import linear_op


def append(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    planes: tuple[Tensor, ...],
    batch: Batch,
    factors: LayerFactors,
    dim: int,
) -> Tensor:
    """Write the latents of a batch's tokens into pages; see `LayerKV.append`."""
    page_size = planes[0].shape[2]
    ranks = factors.k.rank, factors.v.rank
    queries, *latents = torch.split(qkv, [qkv.shape[1] - sum(ranks), *ranks], dim=1)
    indices = batch.kv_indices()
    pages = batch.page_table[batch.sequences, indices // page_size].long()
    for plane, own in zip(planes, latents, strict=True):
        rows = plane.new_zeros(len(own), plane.shape[3])
        rows[:, : own.shape[1]] = own
        plane[pages, 0, indices % page_size] = rows
    cos, sin = (table[batch.positions, None] for table in rope)  # [n, 1, dim / 2]
    first, second = queries.reshape(len(qkv), -1, dim).float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(qkv.dtype)


@dataclass(frozen=True)
class Rebuild:
    """Computes K (after RoPE) and V of pages from their latents.

    On the CPU in fp32, a token's K and V do not depend on the other tokens.
    """

    factors: LayerFactors
    rotation: PageRotation
    dim: int
    up_k: Callable[[Tensor], Tensor]
    up_v: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, factors: LayerFactors, rotation: PageRotation, dim: int) -> Self:
        """Pack the factors of a layer."""
        return cls(factors, rotation, dim, _up(factors.k), _up(factors.v))

    def __call__(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of pages, fp32 `[p, kv_heads, page_size, dim]`.

        Args:
            planes: latents of K and V, `[page, 1, slot, width]`.
            pages: int64 `[p]`.
            first_positions: int64 `[p]`, position of the first token of each page.
        """
        keys, values = (
            self._heads(up, plane[pages, 0])
            for up, plane in zip((self.up_k, self.up_v), planes, strict=True)
        )
        return self.rotation.apply(keys, first_positions), values

    def _heads(self, up: Callable[[Tensor], Tensor], latents: Tensor) -> Tensor:
        """Return heads `[p, kv_heads, slot, dim]` of latents `[p, slot, width]`."""
        count, slots, _ = latents.shape
        rows = latents.flatten(0, 1).to(self.factors.k.u.dtype).contiguous()
        return up(rows).view(count, slots, -1, self.dim).transpose(1, 2).float()


def _up(factor: Factor) -> Callable[[Tensor], Tensor]:
    return linear_op(factor.u, factor.bias)


def pages_of(batch: Batch, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the pages of a batch's sequences and the position of each page's first token.

    Both are int64. A page that several sequences share is listed once.
    """
    tables = batch.page_table.tolist()
    found = {
        page: index * page_size
        for table, length in zip(tables, batch.lengths.tolist(), strict=True)
        for index, page in enumerate(table[: -(-length // page_size)])
    }
    device = batch.page_table.device
    return torch.tensor(list(found), dtype=torch.int64, device=device), torch.tensor(
        list(found.values()), dtype=torch.int64, device=device
    )
