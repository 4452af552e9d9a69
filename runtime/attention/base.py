"""What every attention backend is given, and what it must do."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class SequenceSlice:
    """The tokens of one sequence that a forward pass computes.

    ``tokens`` sit at positions ``first, first + 1, …``; what is before them is in ``pages``
    already, and ``pages`` has room for all of them. ``want_logits`` asks for the logits after the
    last of them.
    """

    tokens: Sequence[int]
    first: int
    pages: Sequence[int]
    want_logits: bool = True


@dataclass(frozen=True)
class Batch:
    """The ragged input of one forward pass over `s` sequences with `n` tokens together.

    Attributes:
        tokens: int64 `[n]`, sequence after sequence.
        positions: int64 `[n]`, of each token in its sequence.
        page_table: int32 `[s, p]`, the pages of each sequence, padded with 0.
        starts: int32 `[s + 1]`, where each sequence's tokens start in `tokens`.
        lengths: int32 `[s]`, tokens of each sequence in its pages after this pass.
        sequences: int32 `[n]`, which sequence each token belongs to.
        logit_rows: int64 `[m]`, the tokens after which logits are wanted.
        single: whether every sequence has one token.
    """

    tokens: Tensor
    positions: Tensor
    page_table: Tensor
    starts: Tensor
    lengths: Tensor
    sequences: Tensor
    logit_rows: Tensor
    single: bool

    @cached_property
    def tables(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """`page_table`, `starts` and `lengths` as a compiled loop takes them; on the CPU only."""
        return self.page_table.numpy(), self.starts.numpy(), self.lengths.numpy()

    def where_logits(self) -> "Batch":
        """The tokens after which logits are wanted, each as a sequence's only new one."""
        rows = self.logit_rows
        count = torch.arange(len(rows) + 1, device=rows.device)
        return Batch(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            page_table=self.page_table[self.sequences[rows]],
            starts=count.int(),
            lengths=self.positions[rows].int() + 1,
            sequences=count[:-1].int(),
            logit_rows=count[:-1],
            single=True,
        )

    @staticmethod
    def static(sequences: int, pages: int, device: torch.device | str) -> "Batch":
        """One token of each sequence, all numbers 0: for who writes them in place."""
        count = torch.arange(sequences + 1, device=device)
        room = Batch.room(sequences, sequences, pages, sequences, device)
        return replace(
            room, starts=count.int(), sequences=count[:-1].int(), logit_rows=count[:-1], single=True
        )

    @staticmethod
    def room(
        tokens: int, sequences: int, pages: int, logits: int, device: torch.device | str
    ) -> "Batch":
        """Any batch of such a size, all numbers 0: for who writes them in place."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return Batch(
            tokens=zeros(tokens, dtype=torch.int64),
            positions=zeros(tokens, dtype=torch.int64),
            page_table=zeros(sequences, pages),
            starts=zeros(sequences + 1),
            lengths=zeros(sequences),
            sequences=zeros(tokens),
            logit_rows=zeros(logits, dtype=torch.int64),
            single=False,
        )

    @staticmethod
    def of(slices: Sequence[SequenceSlice], device: torch.device | str = "cpu") -> "Batch":
        """The batch of some sequences, in their order."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        starts, lengths, rows = [0], [], []
        width = max(len(piece.pages) for piece in slices)
        table = [[*piece.pages, *[0] * (width - len(piece.pages))] for piece in slices]
        for number, piece in enumerate(slices):
            end = piece.first + len(piece.tokens)
            tokens += piece.tokens
            sequences += [number] * len(piece.tokens)
            positions += range(piece.first, end)
            starts.append(len(tokens))
            lengths.append(end)
            if piece.want_logits:
                rows.append(len(tokens) - 1)

        def ints(values: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Batch(
            tokens=ints(tokens, torch.int64),
            positions=ints(positions, torch.int64),
            page_table=ints(table, torch.int32),
            starts=ints(starts, torch.int32),
            lengths=ints(lengths, torch.int32),
            sequences=ints(sequences, torch.int32),
            single=len(tokens) == len(slices),
            logit_rows=ints(rows, torch.int64),
        )


class DenseAttention(Protocol):
    """Causal attention over dense K and V in pages: the kernels of KV format `dense`.

    K and V are read from the pages, as bf16, also those of the tokens being computed, so that it
    makes no difference which worker wrote them. Nothing past a sequence's length is ever read.
    """

    name: str
    version: int

    def write(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Turn q and k by their positions, and put k and v into the pages.

        Args:
            qkv: `[n, (heads + 2 kv_heads) * dim]`, of each token q, k and v, before RoPE.
            rope: cosines and sines, fp32 `[context, dim / 2]` each.
            k_pages, v_pages: bf16 `[page, kv_head, slot, dim]`, written.

        Returns:
            q after RoPE, `[n, heads, dim]`, of qkv's dtype.
        """
        ...

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> Tensor:
        """Softmax(q·k / √dim)·v over each token's sequence up to and including itself.

        Args:
            q: `[n, heads, dim]`, after RoPE.
            k_pages, v_pages: bf16 `[page, kv_head, slot, dim]`.

        Returns:
            `[n, heads * dim]`, of q's dtype.
        """
        ...
