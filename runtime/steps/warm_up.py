"""Warm-up without replay: compile all kernel variants before the first request.

Triton compiles separate kernels for integer arguments equal to 1, for multiples of 16, and for all
other values. The launch of decode attention also depends on the number of sequences. One batch of
dummy tokens is computed for each variant of the kernels. Its KV is written to page 0, which is not
allocated yet.
"""

from collections.abc import Callable, Iterator

from runtime.attention.base import Batch, SequenceSlice
from runtime.core.limits import Limits
from runtime.core.request import SamplingParams
from runtime.kv.cache import PagedCache
from runtime.models.model import Model
from runtime.pages.plan import PagePlan
from runtime.sampling.reference import SamplingRow, sample
from runtime.steps.prompts import PromptPageEncoder, dummy_slice

Progress = Callable[[str, int], None]
"""Callback ``(stage, size)``, called after each part of a warm-up.

The size is a number of sequences in stage "prefill", of tokens in stage "prompts" (graphs of mixed
passes), and of batch slots in stage "decode" (graphs of decode passes).
"""

SAMPLED = (SamplingParams(), SamplingParams(temperature=1.0))
"""Sampling parameters typical of requests: greedy, and random without bias or penalties."""
_WIDTHS = (1, 2, 16)
"""Page-table widths, in pages, for which Triton compiles separate kernels."""
_ROWS = tuple(SamplingRow(sampling, 0, (0,), 1) for sampling in SAMPLED)


def silent(_stage: str, _size: int) -> None:
    """Ignore progress."""


def warm_up_prefill(
    model: Model, cache: PagedCache, limits: Limits, encoder: PromptPageEncoder, progress: Progress
) -> None:
    """Compute and sample a batch for each kernel variant, then compute the largest batch.

    Args:
        encoder: the encoder of the pages of ``cache``.
    """
    for sequences in _powers_of_two(min(limits.max_running, limits.step_tokens // 2)):
        for batch in _small(sequences, cache.layout.plan):
            logits = model.forward(Batch.of(batch, model.device), cache)
            whole = model.vocabulary.whole(logits[:1])
            for row in _ROWS:
                sample(whole, [row])
        progress("prefill", sequences)
    encoder.warm_up()
    largest = _largest(limits, model.context_length, cache.layout.plan)
    model.forward(Batch.of(largest, model.device), cache)
    progress("prefill", len(largest))


def _small(sequences: int, plan: PagePlan) -> Iterator[list[SequenceSlice]]:
    """Yield a prefill batch of two-token prompts and a decode batch for each page-table width.

    A decode batch has one token per sequence. All page-table entries are page 0.
    """
    for width in _WIDTHS:
        yield [dummy_slice(2, 0, [0] * plan.prompt_groups, width)] * sequences
        yield [dummy_slice(1, 2, [0] * len(plan.groups), width)] * sequences


def _largest(limits: Limits, context: int, plan: PagePlan) -> list[SequenceSlice]:
    """Return a prefill batch with the maximum number of tokens of a step. All pages are page 0."""
    each = min(limits.chunk_tokens, context - 1)
    piece = dummy_slice(each, 0, [0] * plan.prompt_groups, plan.pages(each))
    return [piece] * max(1, limits.step_tokens // each)


def _powers_of_two(maximum: int) -> Iterator[int]:
    """Yield 1, 2, 4, … up to ``maximum``, but at least 1."""
    yield from (1 << power for power in range(max(maximum, 1).bit_length()))
