"""Prefill warm-up: compile all kernel variants before the first request.

Triton specializes kernels for integer arguments that are 1, multiples of 16, or anything else, and
decode attention splits lengths by the number of sequences. A batch of each kind is computed once,
with dummy tokens, into a page that is not allocated yet.
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
"""Callback with the stage and size of each completed part of a warm-up.

Stages: "prefill" with a number of sequences, "prompts" (prefill graphs) with a number of tokens,
and "decode" (decode graphs) with a number of batch slots.
"""

SAMPLED = (SamplingParams(), SamplingParams(temperature=1.0))
"""Sampling of nearly all requests: greedy, and random without bias or penalties."""
_WIDTHS = (1, 2, 16)
"""Page-table widths that Triton specializes separately."""
_ROWS = tuple(SamplingRow(sampling, 0, (0,), 1) for sampling in SAMPLED)


def silent(_stage: str, _size: int) -> None:
    """Ignore progress."""


def warm_up_prefill(model: Model, cache: PagedCache, limits: Limits, progress: Progress) -> None:
    """Compute a batch of each kind, then the largest possible one, and sample from the logits."""
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
    """Yield batches of prompts of two tokens, then of one more token each, all in page 0."""
    for width in _WIDTHS:
        for tokens, first in (((0, 0), 0), ((0,), 2)):
            yield [SequenceSlice(tokens, first, (0,) * width)] * sequences


def _largest(limits: Limits, context: int, page_size: int) -> list[SequenceSlice]:
    """Return the chunks of a step with the maximum number of tokens."""
    each = min(limits.chunk_tokens, context - 1)
    pages = (0,) * pages_for(each, page_size)
    return [SequenceSlice((0,) * each, 0, pages)] * max(1, limits.step_tokens // each)


def _powers_of_two(maximum: int) -> Iterator[int]:
    """Yield 1, 2, 4, … up to ``maximum``, and 1 in any case."""
    number = 1
    while number == 1 or number <= maximum:
        yield number
        number *= 2
