"""Replayed engine steps, launched before the results of the previous step have been read.

A step is one forward pass, a decode pass or a mixed pass, and then the sampling of its tokens. A
running sequence holds a batch slot. Its sampled token becomes the slot's input token on the device,
so the next step can be launched before the host has read the token (lookahead). The first token of
a prompt is sampled in the same way.

If a grammar constrains a token of the step, `StepReplay.launch` launches the forward pass only. The
host then reads the previous step, computes the masks while the device computes the pass, and
launches the sampling by `ConstrainedStep.sample`.

`StepReplay.launch` writes only changes of the slots, such as
joined sequences and new page-table entries. `StepReplay.collect` waits for the tokens.

If the device cannot draw a slot's token (`DeviceSampler.resolved` is 0), the slot does not advance.
A step that was launched in the meantime computes the slot again. The host completes the sampling of
the latest step only, because only its logits are still available. Held prompts are not computed
again. Their logits are kept with the step.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from runtime.core.options import EngineOptions
from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import PromptLogprobs
from runtime.core.sequence import Purpose, SequenceState
from runtime.grammar.masks import MaskWords, TokenMasks
from runtime.graphs.host_copy import HostCopy, to_device
from runtime.kv.cache import PagedCache
from runtime.models.model import Model
from runtime.pages.plan import pages_for
from runtime.sampling.on_device import SamplingFeatures
from runtime.sampling.reference import Draw, SamplingRow, sample
from runtime.steps.decode import DecodeReplay
from runtime.steps.eviction import PromptEviction
from runtime.steps.mixed import MixedReplay
from runtime.steps.prompt_logprobs import PromptScorer, ScoredChunk
from runtime.steps.prompts import PromptPageEncoder, slice_of
from runtime.steps.sampling import SlotSampler
from runtime.steps.slots import BatchSlots

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes, in slots, for which graphs are captured. Beyond 256 they grow by a factor of 1.5."""
UNRESOLVED = Draw(-1)
"""Placeholder for a slot that did not advance. The next launched step samples its token again."""


@dataclass(frozen=True)
class SlotAssignment:
    """Batch slots of a step's sequences. Consecutive steps often share an assignment.

    Attributes:
        arrivals: `SequenceState.arrival` of each sequence, which identifies it.
        slots: the slot of each sequence.
        bucket: number of leading slots that the step samples, one of `slot_buckets`; 0 for none.
        features: sampling features of the captured sampling graph.
    """

    arrivals: list[int]
    slots: list[int]
    bucket: int
    features: SamplingFeatures


_NOTHING_SAMPLED = SlotAssignment([], [], 0, SamplingFeatures.of([]))


@dataclass(frozen=True)
class InFlightStep:
    """A launched step whose results the host has not read yet.

    Attributes:
        assignment: slots of the step's sequences.
        sampled: (sequence, slot) pairs of the sequences in `StepPlan.sampled`, whose tokens are
            used.
        ready: number of the event of the cache recorded after the forward pass and, with a
            compressed KV format, the encoding of pages.
        held_logits: logits `[own]` of held prompts whose tokens are random, by slot.
        masks: masks `[words]` of constrained sequences, by slot.
        read_first: whether the step must be read before the next one is launched.
        scored: scored prompt chunks.
    """

    replay: "StepReplay"
    assignment: SlotAssignment
    sampled: list[tuple[SequenceState, int]]
    results: HostCopy
    ready: int
    held_logits: Mapping[int, Tensor]
    masks: Mapping[int, MaskWords]
    read_first: bool
    scored: tuple[ScoredChunk, ...] = ()

    @torch.inference_mode()
    def read(self) -> list[Draw | None]:
        """See `StepReplay.collect`."""
        return self.replay.collect(self)

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """See `runtime.engine.executor.LaunchedStep`."""
        return [chunk.read() for chunk in self.scored]

    def sample(self, masks: TokenMasks) -> None:  # noqa: ARG002 - as in `ConstrainedStep`
        """Fail: the tokens were sampled at the launch."""
        raise ValueError("the step is not constrained")


@dataclass
class ConstrainedStep:
    """A step whose forward pass was launched, and whose tokens are sampled once masks are known.

    Attributes:
        ready: see `InFlightStep`.
        scored: scored prompt chunks.
        step: the step after `sample`.
    """

    replay: "StepReplay"
    assignment: SlotAssignment
    sampled: list[tuple[SequenceState, int]]
    chunks: Sequence[Chunk]
    ready: int
    scored: tuple[ScoredChunk, ...]
    step: InFlightStep | None = None

    @torch.inference_mode()
    def sample(self, masks: TokenMasks) -> None:
        """See `StepReplay.sample`."""
        self.step = self.replay.sample(self, masks)

    def read(self) -> list[Draw | None]:
        """See `StepReplay.collect`. Raises ValueError if the tokens were not sampled."""
        if self.step is None:
            raise ValueError("a constrained step was read before its tokens were sampled")
        return self.step.read()

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """See `runtime.engine.executor.LaunchedStep`."""
        return [chunk.read() for chunk in self.scored]


class StepReplay:
    """Replayed steps of one model over one cache.

    Args:
        cache: KV pages, with null pages (`PagedCache.null_pages`), to which unassigned slots and
            padding write.

    Raises:
        ValueError: the model's attention reads lengths on the host, which a graph cannot capture.
    """

    def __init__(self, model: Model, cache: PagedCache, options: EngineOptions) -> None:
        on_device = model.device.type == "cuda"
        if on_device and not model.kv_format.graph_safe:
            raise ValueError(f"KV format {model.kv_format.name} cannot run in a CUDA graph")
        limits = options.limits
        self._decodes = options.decodes
        self._events = cache.events
        self._buckets = slot_buckets(limits.max_running)
        max_pages = pages_for(model.context_length, model.page_size)
        plan = cache.layout.plan
        self._plan = plan
        self._slots = BatchSlots(
            limits.max_running,
            max_pages,
            cache.null_pages,
            model.device,
            prompt_groups=plan.prompt_groups,
        )
        pool = torch.cuda.graph_pool_handle() if on_device else None
        self._vocabulary = model.vocabulary
        self._sampler = SlotSampler(self._slots, model.vocabulary, pool)
        passes = model, cache, self._slots, self._sampler.logits, pool
        self._decode = DecodeReplay(*passes, by_layer=options.by_layer)
        # A step that decodes ``max_running`` sequences may also compute a page of prompt tokens.
        rows = max(limits.step_tokens, limits.max_running + model.page_size)
        self._mixed = MixedReplay(*passes, max_rows=rows, decodes=options.decodes)
        self._eviction = PromptEviction(model, cache)
        self._encoder = PromptPageEncoder(model, cache)
        self._scorer = PromptScorer(model)
        self._host_copies = cycle(HostCopy(self._sampler.results) for _ in range(2))
        self._assignment = _NOTHING_SAMPLED
        self._latest: InFlightStep | None = None

    def warm_up(self, progress: Callable[[str, int], None]) -> None:
        """Capture all graphs. Call it before the first `launch`.

        Args:
            progress: called with a stage and a size, see `runtime.steps.warm_up.Progress`.
        """
        self._encoder.warm_up()
        self._mixed.warm_up(lambda rows: progress("prompts", rows))
        # The largest is captured first, so that the others reuse its memory.
        buckets = self._buckets[::-1]
        if self._decodes:
            for bucket in buckets:
                self._decode.run(bucket)
                progress("decode", bucket)
        self._sampler.warm_up(buckets)

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        """Return whether a step with ``sequences`` may be launched before the last step is read.

        Return False if sequences should first move to lower slots so that a smaller bucket (number
        of leading slots with a captured graph) suffices. To move a sequence, the host must have
        read all of its tokens.

        Return False as well if the previous step completed a prompt whose first token is random,
        and pages are encoded or tokens were evicted. If the device could not draw that token, the
        next step would compute the last prompt token again. It would then attend to encoded pages
        or to the tokens that eviction has kept, but prompt tokens must not.
        """
        if self._latest is not None and self._latest.read_first:
            return False
        smallest = self._bucket_of(len(sequences))
        if [sequence.arrival for sequence in sequences] == self._assignment.arrivals:
            return self._assignment.bucket <= smallest
        return self._bucket_of(self._slots.extent(sequences)) <= smallest

    def launch(self, plan: StepPlan) -> InFlightStep | ConstrainedStep:
        """Launch a step; see `runtime.engine.Executor.launch`.

        A sequence with a token in flight must have been part of the previous step.
        """
        decode, chunks = plan.decode, plan.chunks
        completed = [
            (sequence, index) for index, chunk in enumerate(chunks) for sequence in chunk.completed
        ]
        prompts = [sequence for sequence, _ in completed]
        sequences = decode + prompts
        assignment = self._assign(sequences)
        joined = self._slots.update(decode)
        self._eviction.forget_except(plan.prefilling)
        scored: tuple[ScoredChunk, ...] = ()
        if chunks:
            pieces = [slice_of(chunk, self._plan.prompt_groups) for chunk in chunks]
            ends = zip(assignment.slots[len(decode) :], completed, strict=True)
            last_tokens = [(slot, index) for slot, (_, index) in ends]
            log, hidden = self._eviction.log(chunks), self._scorer.log(chunks)
            self._mixed.run(pieces, assignment.slots[: len(decode)], last_tokens, log, hidden)
            scored = self._scorer.score(chunks, hidden)
            self._eviction.evict(chunks, log)
        else:
            self._decode.run(assignment.bucket)
        # Only the sampling reads the rest, which is therefore written while the pass runs.
        joined.update(self._slots.update(prompts, rewritten=prompts))
        if joined:
            self._sampler.load(joined)
        pairs = zip(sequences, assignment.slots, strict=True)
        sampled = [(sequence, slot) for sequence, slot in pairs if not sequence.forced]
        if not plan.constrained:
            return self._sample(assignment, sampled, chunks, scored)
        # The host cannot resolve tokens of the previous step any more: its logits are overwritten.
        self._latest = None
        self._encoder.encode(chunks)
        ready = self._events.record()
        return ConstrainedStep(self, assignment, sampled, chunks, ready, scored)

    def sample(self, launched: ConstrainedStep, masks: TokenMasks) -> InFlightStep:
        """Launch the sampling of a constrained step, after the previous step was read."""
        slots = [launched.sampled[row][1] for row in masks.rows]
        self._sampler.load_masks(slots, masks.words)
        of_slot = dict(zip(slots, masks.words, strict=True))
        return self._sample(
            launched.assignment,
            launched.sampled,
            launched.chunks,
            launched.scored,
            launched.ready,
            of_slot,
        )

    def collect(self, step: InFlightStep) -> list[Draw | None]:
        """Wait for the tokens of a step. At most one other step may have been launched after it.

        Returns:
            One item per sampled sequence: its draw, None if its logits are not finite, or
            `UNRESOLVED` if its slot did not advance.
        """
        assignment = step.assignment
        results = step.results.wait()
        sampled = results[0][: assignment.bucket].tolist()
        missing = [slot for _, slot in step.sampled if sampled[slot][1] and not sampled[slot][2]]
        if missing and step is self._latest:
            self._sampler.resolve(missing)
            self._sampler.start_copy(step.results, assignment.bucket, assignment.features)
            sampled = step.results.wait()[0][: assignment.bucket].tolist()
        return self._draws(step, sampled, results)

    def _assign(self, sequences: list[SequenceState]) -> SlotAssignment:
        """Assign slots to the sampled sequences."""
        if not sequences:
            return _NOTHING_SAMPLED
        assignment = self._assignment
        bucket = self._bucket_of(len(sequences))
        arrivals = [sequence.arrival for sequence in sequences]
        if arrivals != assignment.arrivals or assignment.bucket > bucket:
            slots = self._slots.assign(sequences, bucket)
            bucket = self._bucket_of(max(slots) + 1)
            features = SlotSampler.features_of(sequences)
            assignment = self._assignment = SlotAssignment(arrivals, slots, bucket, features)
        return assignment

    def _sample(
        self,
        assignment: SlotAssignment,
        sampled: list[tuple[SequenceState, int]],
        chunks: Sequence[Chunk],
        scored: tuple[ScoredChunk, ...],
        ready: int | None = None,
        masks: Mapping[int, MaskWords] = MappingProxyType({}),
    ) -> InFlightStep:
        """Launch the sampling of a step, the copy of its results, and the encoding of its pages.

        The pages are encoded last, so that first tokens are not delayed.

        Args:
            ready: number of the event after the encoding if the pages were encoded before.
            masks: see `InFlightStep`.
        """
        if ready is None and not self._plan.encodes:
            ready = self._events.record()
        results = next(self._host_copies)
        bucket = assignment.bucket
        features = assignment.features
        held: Mapping[int, Tensor] = {}
        if bucket:
            self._sampler.run(bucket, features)
            held = self._held_logits(assignment, chunks) if features.random else {}
        self._sampler.start_copy(results, bucket, features)
        if ready is None:
            self._encoder.encode(chunks)
            ready = self._events.record()
        read_first = any(
            sequence.request.sampling.temperature > 0 and not sequence.forced
            for chunk in chunks
            if chunk.completes and (self._plan.encodes or chunk.group.evicts)
            for sequence in chunk.group.sequences
        )
        self._latest = InFlightStep(
            self, assignment, sampled, results, ready, held, masks, read_first, scored
        )
        return self._latest

    def _held_logits(
        self, assignment: SlotAssignment, chunks: Sequence[Chunk]
    ) -> Mapping[int, Tensor]:
        """Copy the logits of held prompts whose tokens are random.

        No later step computes them again.
        """
        held = {
            sequence.arrival
            for chunk in chunks
            if chunk.completes and chunk.group.purpose is Purpose.HOLD
            for sequence in chunk.group.sequences
            if sequence.request.sampling.temperature > 0
        }
        pairs = zip(assignment.arrivals, assignment.slots, strict=True)
        slots = [slot for arrival, slot in pairs if arrival in held]
        if not slots:
            return {}
        logits = self._sampler.logits[to_device(np.array(slots), self._sampler.logits.device)]
        return dict(zip(slots, logits, strict=True))

    def _bucket_of(self, slots: int) -> int:
        return self._buckets[bisect_left(self._buckets, slots)]

    def _draws(
        self, step: InFlightStep, sampled: list[list[int]], results: list[Tensor]
    ) -> list[Draw | None]:
        draws: list[Draw | None] = []
        for sequence, slot in step.sampled:
            token, finite, resolved = sampled[slot]
            num_top = sequence.request.sampling.logprobs
            if not finite:
                draws.append(None)
            elif not resolved and slot in step.held_logits:
                logits = self._vocabulary.whole(step.held_logits[slot][None])
                draws += sample(logits, [SamplingRow.of(sequence, step.masks.get(slot))])
            elif not resolved:
                self._slots.did_not_advance(sequence)
                draws.append(UNRESOLVED)
            elif num_top is None:
                draws.append(Draw(token))
            else:
                logprob, values, tokens = (result[slot].tolist() for result in results[1:])
                top = tuple(zip(tokens[:num_top], values[:num_top], strict=True))
                draws.append(Draw(token, logprob[0], top))
        return draws


def slot_buckets(max_slots: int) -> list[int]:
    """Return the buckets up to ``max_slots``: numbers of slots for which graphs are captured."""
    buckets = list(BUCKETS)
    while buckets[-1] < max_slots:
        buckets.append(buckets[-1] * 3 // 2)
    return [bucket for bucket in buckets if bucket < max_slots] + [max_slots]
