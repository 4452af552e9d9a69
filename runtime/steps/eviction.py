"""Eviction of tokens from prompts that a step completes; see `runtime.kv.eviction`.

Scores need the last queries of a prompt. A pass that computes some of them logs them
(`Batch.queries`). They are kept until the prompt is complete, because its last chunk may have fewer
tokens. Scores therefore do not depend on how the prompt was cut into chunks.
"""

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from runtime.attention.base import QueryLog
from runtime.core.plan import Chunk
from runtime.core.sequence import SequenceGroup
from runtime.graphs.host_copy import to_device
from runtime.kv.cache import PagedCache
from runtime.kv.eviction import MAX_ELEMENTS, compact, gumbel_noise, kept_tokens, key_scores
from runtime.models.model import Model
from runtime.pages.eviction import QUERIES
from runtime.pages.window import SINK_PAGES, first_recent

_KV = 2
"""Number of planes of K and V, which come first."""


class PromptEviction:
    """Evicts tokens of prompts from the pages of one cache. All work is in stream order."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        # The last queries of incomplete prompts: for each chunk, one tensor for each layer.
        self._queries: WeakKeyDictionary[SequenceGroup, list[list[Tensor]]] = WeakKeyDictionary()
        self._noise = torch.empty(0, 0)

    def log(self, chunks: Sequence[Chunk]) -> QueryLog | None:
        """Return a log for a pass whose first rows are the tokens of ``chunks``.

        Returns:
            None if the pass computes no query that is needed.
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

        Their sequences then have fewer pages. The others are in `SequenceState.vacated`, and may be
        released when the step has been launched.

        Args:
            log: log of the pass for these chunks.
        """
        if log is None:
            return
        start = 0
        for chunk in chunks:
            if not (count := _logged(chunk)):
                continue
            group = chunk.group
            rows = slice(start, start + count)
            start += count
            if chunk.first <= len(group.tokens) - QUERIES:  # the first chunk with such queries
                self._queries[group] = []
            self._queries[group].append([layer[rows] for layer in log.layers])
            if chunk.completes:
                self._evict(group, self._queries.pop(group))

    def _evict(self, group: SequenceGroup, queries: list[list[Tensor]]) -> None:
        first = group.sequences[0]
        tokens = len(group.tokens)
        size = self._cache.page_size
        config = self._model.config
        begin, end = SINK_PAGES * size, first_recent(tokens, size) * size
        kept = end - begin - first.evicts
        if kept:
            pages = to_device(np.array(first.page_tables[0], np.int64), self._model.device)
            fit = max(1, MAX_ELEMENTS // (tokens * config.head_dim))  # KV heads
            for layers in _ranges(config.num_layers, max(1, fit // config.num_kv_heads)):
                for heads in _ranges(config.num_kv_heads, fit):
                    self._compact(layers, heads, pages, queries, tokens, range(begin, end), kept)
        vacated = range((begin + kept) // size, end // size)
        for sequence in group.sequences:
            sequence.evict(vacated)

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
        """Keep some of the candidates in some KV heads of some layers, directly after the sinks."""
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
        best = kept_tokens(scores[:, candidates.start : candidates.stop], kept)
        best = candidates.start + best.view(len(layers), -1, kept)
        compact(planes, pages, best, candidates.start, heads.start)

    def _noise_of(self, tokens: int) -> Tensor:
        if self._noise.shape[1] < tokens:
            length = min(2 * tokens, self._model.context_length)
            noise = gumbel_noise(length, self._model.config.num_kv_heads)
            self._noise = to_device(noise, self._model.device)
        return self._noise[:, :tokens]


def _ranges(count: int, each: int) -> Iterator[range]:
    """Divide ``range(count)`` into ranges of at most ``each``."""
    for first in range(0, count, each):
        yield range(first, min(first + each, count))


def _logged(chunk: Chunk) -> int:
    """Return the number of the chunk's last tokens whose queries are needed."""
    if not chunk.group.sequences[0].evicts:
        return 0
    end = chunk.first + chunk.count
    return max(0, end - max(chunk.first, len(chunk.group.tokens) - QUERIES))
