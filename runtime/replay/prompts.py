"""Prompt chunks of a step, and the encoding of their pages."""

from collections.abc import Sequence

import numpy as np

from runtime.attention.base import SequenceSlice
from runtime.core.plan import Chunk
from runtime.graphs.host_copy import to_device
from runtime.kv.cache import PagedCache
from runtime.kv.windowed import WindowedFormat
from runtime.models.model import Model
from runtime.pages.window import SINK_PAGES


def slice_of(chunk: Chunk) -> SequenceSlice:
    """Return the tokens of a chunk, with logits if it completes its prompt."""
    group, end = chunk.group, chunk.first + chunk.count
    tokens, pages = group.tokens[chunk.first : end], group.sequences[0].pages
    return SequenceSlice(tokens, chunk.first, pages, chunk.completes)


class PromptEncoder:
    """Encoding of the pages that complete prompts leave outside of their windows.

    Without a compressed KV format, nothing is encoded.
    """

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._page_size, self._device = model.page_size, model.device
        self._encoder = None
        if isinstance(model.kv_format, WindowedFormat):
            layers = [cache.layer(index) for index in range(model.config.num_layers)]
            self._encoder = model.kv_format.encoder(layers)

    def encode(self, chunks: Sequence[Chunk]) -> None:
        """Encode pages of prompt chunks, in stream order.

        The exact pages remain, because later chunks attend them.

        Args:
            chunks: chunks whose computation was launched.
        """
        sources: list[int] = []
        targets: list[int] = []
        first: list[int] = []
        for chunk in chunks:
            sequence = chunk.group.sequences[0]
            pages = stored_range(chunk, self._page_size)
            sources += sequence.pages[pages.start : pages.stop]
            targets += sequence.stored[pages.start - SINK_PAGES : pages.stop - SINK_PAGES]
            first += [page * self._page_size for page in pages]
        if sources:
            self._encode(sources, targets, first)

    def warm_up(self) -> None:
        """Compile the kernels that encode pages. Call it before the first prompt."""
        self._encode([0], [0], [0])

    def _encode(self, sources: list[int], targets: list[int], first: list[int]) -> None:
        """Encode pages.

        Args:
            sources: exact pages.
            targets: stored pages, without repetition.
            first: position of the first token of each page.
        """
        if self._encoder is not None:
            table = to_device(np.array([sources, targets, first], np.int64), self._device)
            self._encoder.encode(*table)


def stored_range(chunk: Chunk, page_size: int) -> range:
    """Return the pages of a chunk, as indices within its sequence, that have stored pages.

    Of a prompt with evicted tokens, all pages belong to the last chunk.
    """
    sequence = chunk.group.sequences[0]
    end = SINK_PAGES + len(sequence.stored)
    if sequence.evicts:
        return range(SINK_PAGES, end if chunk.completes else SINK_PAGES)
    first = max(SINK_PAGES, chunk.first // page_size)
    last = min(end, (chunk.first + chunk.count) // page_size)
    return range(first, max(first, last))
