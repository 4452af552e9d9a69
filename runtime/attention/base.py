"""Inputs of a forward pass, and the interface of attention backends."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.pages.window import SINK_PAGES


@dataclass(frozen=True)
class SequenceSlice:
    """Consecutive tokens of one sequence, to be computed by a forward pass.

    Attributes:
        tokens: token ids at positions ``first``, ``first + 1``, ….
        first: position of the first token. The KV of all earlier tokens is in ``pages``.
        pages: page ids of the sequence, enough for its tokens up to the end of this slice.
        want_logits: whether to compute logits at the last of these tokens.
        stored: stored pages of a sequence to decode, in the order of its pages from the first one
            that is not a sink; None for prompts and for formats without stored pages.
        evicted: number of earlier tokens that are not in ``pages``; see `runtime.pages.eviction`.
    """

    tokens: Sequence[int]
    first: int
    pages: Sequence[int]
    want_logits: bool = True
    stored: Sequence[int] | None = None
    evicted: int = 0


@dataclass(frozen=True)
class QueryLog:
    """Queries of some tokens of a pass, which the pass appends for use after it.

    Attributes:
        rows: int64 `[m]`, indices of the tokens in the batch.
        layers: for each layer computed so far, `[m, heads, dim]`, after RoPE.
    """

    rows: Tensor
    layers: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Ragged input of one forward pass over `s` sequences with `n` tokens in total.

    Attributes:
        tokens: int64 `[n]`, token ids, grouped by sequence.
        positions: int64 `[n]`, position of each token in its sequence, which RoPE depends on.
        page_table: int32 `[s, p]`, page ids of each sequence, padded with 0.
        starts: int32 `[s + 1]`, index of each sequence's first token in ``tokens``, then `n`.
        lengths: int32 `[s]`, number of tokens in the pages of each sequence after this pass. It is
            the position of its last token plus 1, less the evicted tokens. The KV of the last token
            is at index ``lengths - 1`` of the pages.
        sequences: int32 `[n]`, index of each token's sequence.
        logit_rows: int64 `[m]`, indices of the tokens for which logits are computed.
        single: whether every sequence has exactly one token (a decode step).
        stored_table: int32 `[s, p]`, stored pages of each sequence by the index of the page in the
            sequence; None unless the batch decodes with a compressed format.
        queries: log of queries to fill; None if none are needed.
    """

    tokens: Tensor
    positions: Tensor
    page_table: Tensor
    starts: Tensor
    lengths: Tensor
    sequences: Tensor
    logit_rows: Tensor
    single: bool
    stored_table: Tensor | None = None
    queries: QueryLog | None = None

    def kv_indices(self, rows: Tensor | None = None) -> Tensor:
        """Return the index of tokens in the pages of their sequences, int64.

        It equals the position, less the evicted tokens of the sequence.

        Args:
            rows: int64, indices of tokens in the batch; by default, all.
        """
        if rows is None:
            rows = torch.arange(len(self.tokens), device=self.tokens.device)
        sequences = self.sequences[rows]
        return rows + self.lengths[sequences] - self.starts[sequences + 1]

    @cached_property
    def tables(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """``page_table``, ``starts`` and ``lengths`` as numpy arrays, for compiled CPU loops."""
        return self.page_table.numpy(), self.starts.numpy(), self.lengths.numpy()

    def where_logits(self) -> "Batch":
        """Return a batch with only the `m` tokens of ``logit_rows``, one per sequence.

        The last layer uses it: once the KV of all tokens is written, no other tokens are needed.
        """
        rows = self.logit_rows
        count = torch.arange(len(rows) + 1, device=rows.device)
        stored = self.stored_table
        return Batch(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            page_table=self.page_table[self.sequences[rows]],
            starts=count.int(),
            lengths=self.kv_indices(rows).int() + 1,
            sequences=count[:-1].int(),
            logit_rows=count[:-1],
            single=True,
            stored_table=None if stored is None else stored[self.sequences[rows]],
        )

    @staticmethod
    def static(sequences: int, pages: int, device: torch.device | str) -> "Batch":
        """Return a decode batch with one token per sequence, to be filled in place.

        All values are 0, except ``starts``, ``sequences`` and ``logit_rows``, which are constant.
        """
        count = torch.arange(sequences + 1, device=device)
        batch = Batch.zeros(sequences, sequences, pages, sequences, device)
        return replace(
            batch,
            starts=count.int(),
            sequences=count[:-1].int(),
            logit_rows=count[:-1],
            single=True,
        )

    @staticmethod
    def zeros(
        tokens: int, sequences: int, pages: int, logits: int, device: torch.device | str
    ) -> "Batch":
        """Return a batch of the given sizes with all values 0, to be filled in place."""

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
        """Build a batch of sequence slices, in their order.

        Raises:
            ValueError: only some of the slices have stored pages.
        """
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        starts, lengths, rows = [0], [], []
        width = max(len(piece.pages) for piece in slices)
        table = [[*piece.pages, *[0] * (width - len(piece.pages))] for piece in slices]
        stored_table = _stored_table(slices, width)
        for number, piece in enumerate(slices):
            end = piece.first + len(piece.tokens)
            tokens += piece.tokens
            sequences += [number] * len(piece.tokens)
            positions += range(piece.first, end)
            starts.append(len(tokens))
            lengths.append(end - piece.evicted)
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
            stored_table=None if stored_table is None else ints(stored_table, torch.int32),
        )


def _stored_table(slices: Sequence[SequenceSlice], width: int) -> list[list[int]] | None:
    """Return the rows of `Batch.stored_table`; None if no slice has stored pages."""
    stored = [piece.stored for piece in slices if piece.stored is not None]
    if not stored:
        return None
    if len(stored) < len(slices):
        raise ValueError(
            f"{len(stored)} of {len(slices)} slices have stored pages: a batch with stored pages "
            "decodes only, and prompts need a batch of their own"
        )
    held = [[*[0] * SINK_PAGES, *pages] for pages in stored]
    return [[*pages, *[0] * (width - len(pages))] for pages in held]


@dataclass(frozen=True, kw_only=True)
class MixedBatch(Batch):
    """Batch of prompt chunks, some of whose last `d` rows are decode rows.

    A decode row is the only token of its sequence. Decode attention computes these rows, and
    prefill attention all others.

    Attributes:
        chunks: all rows, but only the sequences of the prompt chunks, which come first.
        decode: the last `d` rows as a decode batch.
        decoding: bool `[d, 1]`, which of the last `d` rows are decode rows.
    """

    chunks: Batch
    decode: Batch
    decoding: Tensor


class DenseAttention(Protocol):
    """Interface of the attention kernels for KV format `dense`: causal, over paged K and V.

    All K and V are read from the pages as bf16, including those of the tokens being computed. The
    result therefore does not depend on which worker wrote them. Page slots at or beyond a
    sequence's length do not affect the result.

    Attributes:
        name, version: identity of the kernels in the model's kernel plan.
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
        """Apply RoPE to q and k, and write k and v into the pages.

        Args:
            qkv: `[n, (heads + 2 kv_heads) * dim]`, q, k and v of each token, before RoPE.
            rope: cosines and sines, fp32 `[context, dim / 2]` each.
            k_pages, v_pages: bf16 `[page, kv_head, slot, dim]`, updated in place.

        Returns:
            q after RoPE, `[n, heads, dim]`, in the dtype of ``qkv``.
        """
        ...

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> Tensor:
        """Compute softmax(q·k / √dim)·v over each token's sequence up to and including the token.

        Args:
            q: `[n, heads, dim]`, after RoPE.
            k_pages, v_pages: bf16 `[page, kv_head, slot, dim]`.

        Returns:
            `[n, heads * dim]`, in the dtype of ``q``. Rows beyond the last sequence are undefined.
        """
        ...
