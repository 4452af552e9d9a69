"""Inputs of a forward pass, and the interface of attention backends."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class SequenceSlice:
    """Consecutive tokens of one sequence, to be computed by a forward pass.

    Attributes:
        tokens: token ids at positions ``first``, ``first + 1``, ….
        first: position of the first token. The KV of all earlier tokens is in the pages.
        pages: page ids of the sequence in the first page group: entry i is the id of its i-th page.
            They cover its tokens up to the end of this slice. The id of a page that the group does
            not hold is negative.
        want_logits: whether to compute logits at the last of these tokens.
        more_pages: like ``pages``, for each other page group that the pass uses. A prompt does not
            use the groups into which pages are encoded; they are the last groups
            (`PagePlan.prompt_groups`).
        evicted: number of earlier tokens whose KV was evicted and is not in ``pages``; see
            `runtime.pages.eviction`.
    """

    tokens: Sequence[int]
    first: int
    pages: Sequence[int]
    want_logits: bool = True
    more_pages: Sequence[Sequence[int]] = ()
    evicted: int = 0


@dataclass(frozen=True)
class QueryLog:
    """Queries of some tokens of a pass. Each layer of the pass appends its queries.

    Attributes:
        rows: int64 `[m]`, indices of the tokens in the batch.
        layers: for each layer computed so far, `[m, heads, dim]`, after RoPE.
    """

    rows: Tensor
    layers: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class HiddenLog:
    """Hidden states of some tokens of a pass, which the pass appends.

    Attributes:
        rows: int64 `[m]`, indices of the tokens in the batch.
        hidden: one tensor `[m, hidden]`, the input of the LM head.
    """

    rows: Tensor
    hidden: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Ragged input of one forward pass over `s` sequences with `n` tokens in total.

    Attributes:
        tokens: int64 `[n]`, token ids, grouped by sequence.
        positions: int64 `[n]`, position of each token in its sequence, which RoPE depends on.
        page_table: int32 `[s, p]`, page ids of each sequence in one page group, padded with 0: the
            first group, or the group of the layer that is computed (`of_group`).
        starts: int32 `[s + 1]`, index of each sequence's first token in ``tokens``, then `n`.
        lengths: int32 `[s]`, number of tokens in the pages of each sequence after this pass. It is
            the position of its last token plus 1, less the evicted tokens. The KV of the last token
            is at index ``lengths - 1`` of the pages.
        sequences: int32 `[n]`, index of each token's sequence.
        logit_rows: int64 `[m]`, indices of the tokens for which logits are computed.
        single: whether every sequence has exactly one token (a decode step).
        page_tables: page tables of all page groups that the pass uses; empty if it uses one group.
            Only a decode batch uses the groups into which pages are encoded.
        queries: log of queries to fill; None if none are needed.
        hidden: log of hidden states to fill; None if none are needed.
    """

    tokens: Tensor
    positions: Tensor
    page_table: Tensor
    starts: Tensor
    lengths: Tensor
    sequences: Tensor
    logit_rows: Tensor
    single: bool
    page_tables: tuple[Tensor, ...] = ()
    queries: QueryLog | None = None
    hidden: HiddenLog | None = None

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

        The last layer uses it after it has written the KV of all tokens: only the output of these
        tokens is needed.
        """
        rows = self.logit_rows
        count = torch.arange(len(rows) + 1, device=rows.device)
        sequences = self.sequences[rows]
        return Batch(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            page_table=self.page_table[sequences],
            starts=count.int(),
            lengths=self.kv_indices(rows).int() + 1,
            sequences=count[:-1].int(),
            logit_rows=count[:-1],
            single=True,
            page_tables=tuple(table[sequences] for table in self.page_tables),
        )

    def of_group(self, group: int) -> "Batch":
        """Return the batch for layers of a page group, with its table as ``page_table``."""
        if not group:
            return self
        if group not in self._of_groups:
            self._of_groups[group] = self._with_table(group)
        return self._of_groups[group]

    @cached_property
    def _of_groups(self) -> dict[int, "Batch"]:
        return {}

    def _with_table(self, group: int) -> "Batch":
        return replace(self, page_table=self.page_tables[group])

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
            ValueError: the slices use different page groups.
        """
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        starts, lengths, rows = [0], [], []
        tables = _page_tables(slices)
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

        page_tables = tuple(ints(table, torch.int32).clamp_(min=0) for table in tables)
        return Batch(
            tokens=ints(tokens, torch.int64),
            positions=ints(positions, torch.int64),
            page_table=page_tables[0],
            starts=ints(starts, torch.int32),
            lengths=ints(lengths, torch.int32),
            sequences=ints(sequences, torch.int32),
            single=len(tokens) == len(slices),
            logit_rows=ints(rows, torch.int64),
            page_tables=page_tables if len(page_tables) > 1 else (),
        )


def _page_tables(slices: Sequence[SequenceSlice]) -> list[list[list[int]]]:
    """Return the rows of `Batch.page_tables`, all padded to one width with 0."""
    groups = {len(piece.more_pages) for piece in slices}
    if len(groups) > 1:
        raise ValueError(
            "some slices have pages in more page groups than others: sequences that decode with "
            "encoded pages, and prompts, need batches of their own"
        )
    width = max(len(piece.pages) for piece in slices)
    tables = [[_padded(piece.pages, width) for piece in slices]]
    for at in range(groups.pop()):
        more = (piece.more_pages[at] for piece in slices)
        tables.append([_padded(pages, width) for pages in more])
    return tables


def _padded(pages: Sequence[int], width: int) -> list[int]:
    return [*pages, *[0] * (width - len(pages))]


@dataclass(frozen=True, kw_only=True)
class MixedBatch(Batch):
    """Batch of prompt chunks, then decode rows. The last `d` rows include all decode rows.

    A decode row is the only token of its sequence. Decode attention computes these rows, and
    prefill attention all others.

    Attributes:
        chunks: all rows, but only the sequences of the prompt chunks, which come first.
        decode: the last `d` rows as a decode batch.
        decoding: bool `[d, 1]`, which of the last `d` rows are decode rows. The others are padding
            or belong to chunks.
    """

    chunks: Batch
    decode: Batch
    decoding: Tensor

    @property
    def decodes_other_groups(self) -> bool:
        """Whether decode rows use page groups that prompt chunks do not use."""
        return len(self.decode.page_tables) > len(self.page_tables)

    def _with_table(self, group: int) -> "MixedBatch":
        return replace(
            self,
            page_table=self.page_tables[group],
            chunks=self.chunks.of_group(group),
            decode=self.decode.of_group(group),
        )


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
