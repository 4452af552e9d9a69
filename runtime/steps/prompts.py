"""Prompt chunks of a step, and the encoding of their pages."""

from collections.abc import Sequence

import numpy as np

from runtime.attention.base import SequenceSlice
from runtime.core.plan import Chunk
from runtime.core.sequence import FREED
from runtime.graphs.host_copy import to_device
from runtime.kv.cache import PagedCache
from runtime.kv.windowed import WindowedFormat
from runtime.models.model import Model


def slice_of(chunk: Chunk, groups: int) -> SequenceSlice:
    """Return the tokens of a chunk, with logits if it completes its prompt.

    Args:
        groups: see `PagePlan.prompt_groups`.
    """
    group = chunk.group
    pages, *more_pages = group.sequences[0].page_tables[:groups]
    tokens = group.tokens[chunk.first : chunk.end]
    return SequenceSlice(tokens, chunk.first, pages, chunk.completes, more_pages)


def dummy_slice(count: int, first: int, pages: Sequence[int], width: int) -> SequenceSlice:
    """Return ``count`` tokens for a warm-up, whose KV is in a single page of each page group.

    Args:
        first: position of the first token.
        pages: the page of each group.
        width: number of entries of the page tables.
    """
    table, *more_pages = [[page] * width for page in pages]
    return SequenceSlice([0] * count, first, table, more_pages=more_pages)


class PromptPageEncoder:
    """Encodes the pages of prompts that have a compressed page: those outside of sinks and window.

    Without a compressed KV format, nothing is encoded.
    """

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._plan = cache.layout.plan
        self._device = model.device
        self._encoder = None
        if isinstance(model.kv_format, WindowedFormat):
            layers = [cache.layer(index) for index in range(model.config.num_layers)]
            self._encoder = model.kv_format.encoder(layers)

    def encode(self, chunks: Sequence[Chunk]) -> None:
        """Encode the pages of prompt chunks that have a compressed page, in stream order.

        The full-precision pages are not changed, because later chunks attend to them.

        Args:
            chunks: chunks whose computation was launched.
        """
        if self._encoder is None:
            return
        pages: list[tuple[int, int, int]] = []
        for chunk in chunks:
            full_precision, compressed = chunk.prompt.page_tables
            pages += [
                (full_precision[page], compressed[page], page * self._plan.page_size)
                for page in self._pages(chunk, len(compressed))
                if compressed[page] != FREED
            ]
        if pages:
            self._encode(pages)

    def warm_up(self) -> None:
        """Compile the kernels that encode pages. Call it before the first prompt."""
        self._encode([(0, 0, 0)])

    def _encode(self, pages: list[tuple[int, int, int]]) -> None:
        """Encode pages.

        Args:
            pages: for each page, its full-precision page, its compressed page, which no other has,
                and the position of its first token.
        """
        if self._encoder is not None:
            table = np.ascontiguousarray(np.array(pages, np.int64).T)
            self._encoder.encode(*to_device(table, self._device))

    def _pages(self, chunk: Chunk, end: int) -> range:
        """Return the pages of a chunk before page ``end``, as indices within its sequence.

        If tokens of the prompt are evicted, all of its pages belong to the last chunk.
        """
        if chunk.group.evicts:
            return range(end if chunk.completes else 0)
        pages = self._plan.span(chunk.first, chunk.end)
        return range(pages.start, min(pages.stop, end))
