"""Eviction of tokens from prompts that a step completes; see `runtime.kv.eviction`.

Scores need the last queries of a prompt. A pass that computes some of them logs them
(`Batch.queries`). They are kept until the prompt is complete, because its last chunk may have fewer
tokens. Scores therefore do not depend on how the prompt was divided into chunks.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.attention.base import QueryLog
from runtime.core.plan import Chunk
from runtime.graphs.host_copy import to_device
from runtime.kv.cache import PagedCache
from runtime.kv.eviction import MAX_ELEMENTS, compact, gumbel_noise, kept_tokens, key_scores
from runtime.models.model import Model
from runtime.pages.eviction import QUERIES
from runtime.pages.window import SINK_PAGES

_KV = 2
"""Number of planes of a layer that hold K and V. They precede all other planes."""


class PromptEviction:
    """Evicts tokens of prompts from the pages of one cache. All work is in stream order."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        # The last queries of incomplete prompts, by `SequenceGroup.arrival`: for each chunk, one
        # tensor for each layer.
        self._queries: dict[int, list[list[Tensor]]] = {}
        self._noise = torch.empty(0, 0)
        config, whole = model.config, model.config.whole or model.config
        # The same on all ranks, since all take part in a collective.
        self._shares_heads = (
            model.group.size > whole.num_kv_heads and config.num_heads < whole.num_heads
        )

    def forget_except(self, prefilling: Collection[int]) -> None:
        """Drop the stored queries of all other prompts.

        Args:
            prefilling: see `StepPlan.prefilling`.
        """
        for arrival in self._queries.keys() - prefilling:
            del self._queries[arrival]

    def log(self, chunks: Sequence[Chunk]) -> QueryLog | None:
        """Return a log in which a pass stores the queries that scores of prompt tokens need.

        Args:
            chunks: chunks of the pass; their tokens are its first rows, in this order.

        Returns:
            The log, or None if the pass computes none of these queries.
        """
        rows: list[int] = []
        start = 0
        for chunk in chunks:
            start += chunk.count
            rows += range(start - _logged(chunk), start)
        if not rows:
            return None
        return QueryLog(to_device(np.array(rows, np.int64), self._model.device))

    def evict(self, chunks: Sequence[Chunk], log: QueryLog | None) -> None:
        """Evict tokens of the prompts that a pass has completed.

        The tokens that are kept are then in the pages of the sequences of `Chunk.completed`.

        Args:
            chunks: chunks of the pass.
            log: result of `log` for these chunks, filled by the pass.
        """
        if log is None:
            return
        start = 0
        for chunk in chunks:
            if not (count := _logged(chunk)):
                continue
            arrival = chunk.group.arrival
            rows = slice(start, start + count)
            start += count
            is_first_logged = chunk.first <= len(chunk.group.tokens) - QUERIES
            if is_first_logged:
                self._queries[arrival] = []
            self._queries[arrival].append([layer[rows] for layer in log.layers])
            if chunk.completes:
                self._evict(chunk, self._queries.pop(arrival))

    def _evict(self, chunk: Chunk, queries: list[list[Tensor]]) -> None:
        tokens = chunk.end
        size = self._cache.layout.page_size
        config = self._model.config
        candidates = range(SINK_PAGES * size, chunk.vacated.stop * size)
        kept = len(candidates) - chunk.group.evicts
        if not kept:
            return
        table = chunk.group.sequences[0].page_tables[0]
        pages = to_device(np.array(table, np.int64), self._model.device)
        heads_together = max(1, MAX_ELEMENTS // (tokens * config.head_dim))
        layers_together = max(1, heads_together // config.num_kv_heads)
        for layers in _ranges(config.num_layers, layers_together):
            for heads in _ranges(config.num_kv_heads, heads_together):
                self._compact(layers, heads, pages, queries, tokens, candidates, kept)

    def _compact(
        self,
        layers: range,
        heads: range,
        pages: Tensor,
        queries: list[list[Tensor]],
        tokens: int,
        candidates: range,
        kept: int,
    ) -> None:
        """Keep ``kept`` candidate tokens per KV head, moved to the pages directly after the sinks.

        Args:
            layers, heads: layers and KV heads to process.
            pages: int64, full-precision pages of the prompt.
            queries: for each chunk with logged queries, one tensor `[n, heads, dim]` per layer.
            tokens: number of tokens of the prompt.
            candidates: positions between the sinks and the window.
        """
        planes = [self._cache.layer(index)[:_KV] for index in layers]
        own_heads = slice(heads.start, heads.stop)
        # [heads, p, slot, dim] -> [heads, t, dim]
        by_head = [
            keys.transpose(0, 1)[own_heads].index_select(1, pages).flatten(1, 2)
            for keys, _ in planes
        ]
        keys = torch.cat(by_head)[:, :tokens]  # [layers * heads, t, dim]
        group = self._model.config.num_heads // self._model.config.num_kv_heads
        asking = slice(group * heads.start, group * heads.stop)
        # [QUERIES, layers * query heads, dim]
        own = torch.cat(
            [torch.cat([chunk[i][:, asking] for chunk in queries]) for i in layers], dim=1
        )
        noise = self._noise_of(tokens)[own_heads].repeat(len(layers), 1)
        scores = key_scores(own, keys, noise)
        if self._shares_heads:
            scores = self._sum_over_ranks(scores.view(len(layers), len(heads), tokens), heads)
        best = kept_tokens(scores[:, candidates.start : candidates.stop], kept)
        best = candidates.start + best.view(len(layers), -1, kept)
        compact(planes, pages, best, candidates.start, heads.start)

    def _sum_over_ranks(self, scores: Tensor, heads: range) -> Tensor:
        """Add the scores of the query heads that other ranks have of the same KV heads.

        All copies of a KV head then keep the same tokens.

        Args:
            scores: `[layers, heads, t]`, sums over the query heads of this rank.
            heads: KV heads of this rank.

        Returns:
            fp32 `[layers * heads, t]`.
        """
        config = self._model.config
        own = slice(config.first_kv_head + heads.start, config.first_kv_head + heads.stop)
        total = scores.new_zeros(len(scores), config.all_kv_heads, scores.shape[2])
        total[:, own] = scores
        return self._model.group.all_reduce(total)[:, own].flatten(0, 1)

    def _noise_of(self, tokens: int) -> Tensor:
        if self._noise.shape[1] < tokens:
            length = min(2 * tokens, self._model.context_length)
            config = self._model.config
            noise = gumbel_noise(length, config.num_kv_heads, config.first_kv_head)
            self._noise = to_device(noise, self._model.device)
        return self._noise[:, :tokens]


def _ranges(count: int, each: int) -> Iterator[range]:
    """Divide ``range(count)`` into ranges of at most ``each`` numbers."""
    for first in range(0, count, each):
        yield range(first, min(first + each, count))


def _logged(chunk: Chunk) -> int:
    """Return the number of the chunk's last tokens whose queries are needed."""
    if not chunk.group.evicts:
        return 0
    return max(0, chunk.end - max(chunk.first, len(chunk.group.tokens) - QUERIES))
