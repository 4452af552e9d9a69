"""Steps that call the model directly, without CUDA graphs and without lookahead."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from runtime.attention.base import Batch, HiddenLog, QueryLog, SequenceSlice
from runtime.core.limits import Limits
from runtime.core.plan import StepPlan
from runtime.core.request import PromptLogprobs
from runtime.core.sequence import SequenceState
from runtime.grammar.masks import TokenMasks
from runtime.kv.cache import PagedCache
from runtime.models.model import Model
from runtime.sampling.reference import Draw, SamplingRow, sample
from runtime.steps.eviction import PromptEviction
from runtime.steps.prompt_logprobs import PromptScorer, ScoredChunk
from runtime.steps.prompts import PromptPageEncoder, slice_of
from runtime.steps.warm_up import Progress, warm_up_prefill


@dataclass
class DirectStep:
    """A computed step, with a draw for each sampled sequence, and the scored prompt chunks.

    Attributes:
        complete: samples the tokens of a constrained step, given its masks.
    """

    ready: int
    complete: Callable[[TokenMasks | None], list[Draw | None]]
    scored: tuple[ScoredChunk, ...] = ()
    draws: list[Draw | None] = field(default_factory=list)

    def sample(self, masks: TokenMasks | None = None) -> None:
        self.draws = self.complete(masks)

    def read(self) -> list[Draw | None]:
        return self.draws

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        return [chunk.read() for chunk in self.scored]


@dataclass(frozen=True)
class _Logits:
    """Logits of the sequences that a forward pass samples, `[len(sequences), vocab]`."""

    sequences: list[SequenceState]
    values: Tensor


class DirectSteps:
    """Computes a step as two forward passes: one over prompt chunks, one over running sequences."""

    def __init__(self, model: Model, cache: PagedCache, limits: Limits) -> None:
        self._model = model
        self._cache = cache
        self._limits = limits
        self._prompt_groups = cache.layout.plan.prompt_groups
        self._eviction = PromptEviction(model, cache)
        self._encoder = PromptPageEncoder(model, cache)
        self._scorer = PromptScorer(model)

    def warm_up(self, progress: Progress) -> None:
        """Compile kernels; see `warm_up_prefill`."""
        warm_up_prefill(self._model, self._cache, self._limits, self._encoder, progress)

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:  # noqa: ARG002 - as in `StepReplay`
        """Return False: each step samples the tokens that the next one needs on the host."""
        return False

    def launch(self, plan: StepPlan) -> DirectStep:
        """Compute and sample a step; see `runtime.engine.Executor.launch`."""
        slices = [self._next_token(sequence) for sequence in plan.decode]
        passes = [self._compute(slices, [[sequence] for sequence in plan.decode])]
        slices = [slice_of(chunk, self._prompt_groups) for chunk in plan.chunks]
        groups = [chunk.group.sequences for chunk in plan.chunks if chunk.completes]
        self._eviction.forget_except(plan.prefilling)
        log = self._eviction.log(plan.chunks)
        hidden = self._scorer.log(plan.chunks)
        passes.append(self._compute(slices, groups, log, hidden))
        scored = self._scorer.score(plan.chunks, hidden)
        self._eviction.evict(plan.chunks, log)
        self._encoder.encode(plan.chunks)
        step = DirectStep(self._cache.events.record(), partial(_sample, passes), scored)
        if not plan.constrained:
            step.sample()
        return step

    def _next_token(self, sequence: SequenceState) -> SequenceSlice:
        """Return the last token of a sequence, whose KV the step computes."""
        last = len(sequence.tokens) - 1
        pages, *more_pages = sequence.page_tables
        return SequenceSlice(
            sequence.tokens[-1:], last, pages, more_pages=more_pages, evicted=sequence.evicted
        )

    def _compute(
        self,
        slices: list[SequenceSlice],
        groups: list[list[SequenceState]],
        queries: QueryLog | None = None,
        hidden: HiddenLog | None = None,
    ) -> _Logits | None:
        """Compute a batch of ``slices``, and return the logits of the sequences to sample.

        Row i is sampled once for each sequence of ``groups[i]``, except for those whose next token
        is forced.
        """
        if not slices:
            return None
        batch = replace(Batch.of(slices, self._model.device), queries=queries, hidden=hidden)
        logits = self._model.forward(batch, self._cache)
        sampled = [
            (sequence, row)
            for row, group in enumerate(groups)
            for sequence in group
            if not sequence.forced
        ]
        if not sampled:
            return None
        sequences, rows = zip(*sampled, strict=True)
        each = torch.tensor(rows, device=logits.device)
        return _Logits(list(sequences), self._model.vocabulary.whole(logits[each]))


@torch.inference_mode()
def _sample(passes: list[_Logits | None], masks: TokenMasks | None) -> list[Draw | None]:
    """Sample the tokens of a step's forward passes."""
    of_row = masks.by_row() if masks else {}
    draws: list[Draw | None] = []
    for logits in passes:
        if logits is not None:
            rows = [
                SamplingRow.of(sequence, of_row.get(row))
                for row, sequence in enumerate(logits.sequences, len(draws))
            ]
            draws += sample(logits.values, rows)
    return draws
