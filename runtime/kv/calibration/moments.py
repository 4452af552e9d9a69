"""Second moments of one layer's q, k and v over calibration text."""

from typing import Self

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.kv.rotation import PageRotation

SKIPPED = 16
"""Tokens at the start of each text that are not measured: their page is never encoded."""


class KVMoments:
    """Sums over tokens, in fp64, from which all calibrated formats compute their bases.

    Tokens are added in pieces and not kept. A layer needs ``8 (kv_heads * dim)² +
    24 kv_heads * dim²`` bytes.

    Args:
        sample_every: V of one token of every ``sample_every`` is kept; 0 keeps none.
        page_every: one page of every ``page_every`` is kept; 0 keeps none.

    Attributes:
        queries: ``[kv_heads, dim, dim]``, Σ qᵀq of q after RoPE, over the query heads of each KV
            head.
        keys: ``[kv_heads, dim, dim]``, Σ kᵀk of k after RoPE.
        values: ``[kv_heads, dim, dim]``, Σ vᵀv.
        unrotated_keys: ``[kv_heads * dim, kv_heads * dim]``, Σ kᵀk of k before RoPE, where k is
            the concatenation of all heads.
        unrotated_sum: ``[kv_heads * dim]``, Σ k of the same k.
        tokens: number of tokens.
        value_samples: V of the tokens that are kept, bf16 ``[kv_heads, n, dim]``, a tensor for
            each call of `add`.
        sample_pages: pages of `SKIPPED` tokens that are kept: K (after RoPE) and V, bf16 ``[p,
            kv_heads, SKIPPED, dim]``, and the positions of their first tokens, int64 ``[p]``.
    """

    def __init__(
        self,
        kv_heads: int,
        dim: int,
        device: torch.device | str = "cpu",
        sample_every: int = 0,
        page_every: int = 0,
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.queries, self.keys, self.values = (zeros(kv_heads, dim, dim) for _ in range(3))
        self.unrotated_keys = zeros(kv_heads * dim, kv_heads * dim)
        self.unrotated_sum = zeros(kv_heads * dim)
        self.tokens = 0
        self.value_samples: list[Tensor] = []
        self.sample_pages: list[tuple[Tensor, Tensor, Tensor]] = []
        self._sample_every = sample_every
        self._page_every = page_every
        self._pages = 0

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        sample_every: int = 0,
        page_every: int = 0,
    ) -> Self:
        """Return empty sums for one layer of a model."""
        return cls(config.num_kv_heads, config.head_dim, device, sample_every, page_every)

    def add(self, q: Tensor, k: Tensor, v: Tensor, rotation: PageRotation) -> None:
        """Add texts that start at position 0. Their first `SKIPPED` tokens are ignored.

        Args:
            q: ``[batch, heads, length, dim]``, after RoPE, of any floating-point dtype.
            k: ``[batch, kv_heads, length, dim]``, after RoPE.
            v: ``[batch, kv_heads, length, dim]``.
            rotation: RoPE of the model, on the device of the tensors.
        """
        first = torch.full((len(k),), SKIPPED, device=k.device)
        q, k, v = (x[:, :, SKIPPED:] for x in (q, k, v))
        kv_heads, dim = k.shape[1], k.shape[3]
        unrotated = rotation.undo(k.float(), first).transpose(1, 2).reshape(-1, kv_heads * dim)
        self.queries += _gram(q.reshape(len(q), kv_heads, -1, dim).transpose(0, 1))
        self.keys += _gram(k.transpose(0, 1))
        self.values += _gram(v.transpose(0, 1))
        self.unrotated_keys += _gram(unrotated[None])[0]
        self.unrotated_sum += unrotated.sum(0, dtype=torch.float64)
        if self._sample_every:
            # Continue the interval of earlier calls, whose texts may be short.
            first_sample = -self.tokens % self._sample_every
            by_token = v.transpose(0, 1).flatten(1, 2)  # [kv_heads, batch * n, dim]
            kept = by_token[:, first_sample :: self._sample_every]
            self.value_samples.append(kept.to(torch.bfloat16, copy=True))
        if self._page_every:
            self._keep_pages(k, v)
        self.tokens += len(unrotated)

    def _keep_pages(self, k: Tensor, v: Tensor) -> None:
        """Append one of every `page_every` pages to `sample_pages`.

        ``k`` and ``v`` start at position `SKIPPED` of their texts: `add` has removed the tokens
        before it.
        """
        count = k.shape[2] // SKIPPED
        first = -self._pages % self._page_every  # continue the interval of earlier calls
        kept = torch.arange(first, len(k) * count, self._page_every, device=k.device)
        keys, values = (
            x[:, :, : count * SKIPPED]
            .reshape(*x.shape[:2], count, SKIPPED, x.shape[3])
            .transpose(1, 2)
            .flatten(0, 1)[kept]
            .to(torch.bfloat16)
            for x in (k, v)
        )
        self.sample_pages.append((keys, values, (kept % count + 1) * SKIPPED))
        self._pages += len(k) * count


def _gram(vectors: Tensor) -> Tensor:
    """Return Σ xᵀx over vectors ``[heads, ..., dim]``, fp64 ``[heads, dim, dim]``."""
    rows = vectors.flatten(1, -2).double()
    return rows.transpose(1, 2) @ rows
