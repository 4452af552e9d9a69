"""What a device is asked before the first request, so that no request waits for a compiler.

Kernels are compiled for kinds of sizes: Triton tells 1, multiples of 16 and all else apart, and
decode splits lengths by the number of sequences. Batches of each kind are computed once, of tokens
that nobody sent, into a page that nobody has yet.
"""

from collections.abc import Callable, Iterator

from runtime.attention.base import Batch, SequenceSlice
from runtime.core.limits import Limits
from runtime.core.request import SamplingParams
from runtime.kv.cache import PagedCache
from runtime.kv.pages import pages_for
from runtime.models.model import Model
from runtime.sampling.reference import SamplingRow, sample

Progress = Callable[[str, int], None]
"""Told of each part as it is done, by stage and size: "prefill" of so many sequences; graphs of
"prompts" of so many tokens and of "decode" with so many rows."""

SAMPLED = (SamplingParams(), SamplingParams(temperature=1.0))
"""What nearly every request asks for: greedy, and drawn without anything that reshapes."""
_WIDTHS = (1, 2, 16)
"""Of page tables."""
_ROWS = tuple(SamplingRow(sampling, 0, (0,), 1) for sampling in SAMPLED)


def silent(_stage: str, _size: int) -> None:
    """Progress that nobody follows."""


def warm_up_prefill(model: Model, cache: PagedCache, limits: Limits, progress: Progress) -> None:
    """Compute a batch of every kind that prefill has, the largest included, and sample from it."""
    for sequences in _powers_of_two(min(limits.max_running, limits.step_tokens // 2)):
        for batch in _small(sequences):
            logits = model.forward(Batch.of(batch, model.device), cache)
            for row in _ROWS:
                sample(logits[:1], [row])
        progress("prefill", sequences)
    largest = _largest(limits, model.context_length, model.page_size)
    model.forward(Batch.of(largest, model.device), cache)
    progress("prefill", len(largest))


def _small(sequences: int) -> Iterator[list[SequenceSlice]]:
    """Prompts of two tokens, then one more of each, all of them in page 0."""
    for width in _WIDTHS:
        for tokens, first in (((0, 0), 0), ((0,), 2)):
            yield [SequenceSlice(tokens, first, (0,) * width)] * sequences


def _largest(limits: Limits, context: int, page_size: int) -> list[SequenceSlice]:
    """As many tokens as a step may have, as chunks of the largest size."""
    each = min(limits.chunk_tokens, context - 1)
    pages = (0,) * pages_for(each, page_size)
    return [SequenceSlice((0,) * each, 0, pages)] * max(1, limits.step_tokens // each)


def _powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4, … up to ``most``, and 1 in any case."""
    number = 1
    while number == 1 or number <= most:
        yield number
        number *= 2
