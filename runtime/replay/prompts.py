"""Prompt chunks of a step, and the encoding of their pages."""

from collections.abc import Sequence

import numpy as np

from runtime.attention.base import SequenceSlice
from runtime.core.plan import Chunk
from runtime.core.window import SINK_PAGES
from runtime.graphs.host_copy import to_device
from runtime.kv.cache import PagedCache
from runtime.kv.windowed import WindowedFormat
from runtime.models.model import Model


def slice_of(chunk: Chunk) -> SequenceSlice:
    """Return the tokens of a chunk, with logits if it completes its prompt."""
    group, end = chunk.group, chunk.first + chunk.count
    tokens, pages = group.tokens[chunk.first : end], group.sequences[0].pages
    return SequenceSlice(tokens, chunk.first, pages, chunk.completes)


def encode_prompts(model: Model, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
    """Encode the pages of prompt chunks that the complete prompt leaves outside of its window.

    The exact pages remain, because later chunks attend them. The work is in stream order. Nothing
    is done without a compressed KV format.

    Args:
        chunks: chunks whose computation was launched.
    """
    sources: list[int] = []
    targets: list[int] = []
    first: list[int] = []
    for chunk in chunks:
        sequence = chunk.group.sequences[0]
        pages = stored_range(chunk, model.page_size)
        sources += sequence.pages[pages.start : pages.stop]
        targets += sequence.stored[pages.start - SINK_PAGES : pages.stop - SINK_PAGES]
        first += [page * model.page_size for page in pages]
    if sources:
        _encode(model, cache, sources, targets, first)


def warm_up_encode(model: Model, cache: PagedCache) -> None:
    """Compile the kernels that encode pages. Call it before the first prompt.

    Numbers of pages are 1, a multiple of 16, and another; see `runtime.replay.warm_up`.
    """
    for count in (1, 2, 16):
        pages = list(range(min(count, *(len(plane) for plane in cache.planes))))
        _encode(model, cache, pages, pages, [0] * len(pages))


def _encode(
    model: Model, cache: PagedCache, sources: list[int], targets: list[int], first: list[int]
) -> None:
    """Encode exact pages in all layers, if the KV format is compressed.

    Args:
        sources: exact pages.
        targets: stored pages, without repetition.
        first: position of the first token of each page.
    """
    if isinstance(model.kv_format, WindowedFormat):
        layers = [cache.layer(index) for index in range(model.config.num_layers)]
        table = to_device(np.array([sources, targets, first], np.int64), model.device)
        model.kv_format.encode(layers, *table)


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
