"""Decode steps over static tensors, replayed as CUDA graphs.

A running sequence holds a batch slot. A step prepares the input of the next step on the device: the
sampled token becomes the slot's input token, and its position advances. The next step can therefore
be launched before the host has read the sampled tokens (lookahead). `DecodeReplay.launch` writes
only changes, such as joined sequences and new page-table entries. `DecodeReplay.collect` waits for
the tokens. A graph is captured for each batch size in `BUCKETS` and each set of sampling features,
at first use or by `DecodeReplay.warm_up`. On the CPU the same step runs without a graph.

If the device cannot draw a slot's token (`DeviceSampler.resolved` is 0), the slot does not advance.
A step that was launched in the meantime computes the slot again. The host completes the sampling of
the latest step only, because only its logits are still available.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.core.request import MAX_LOGPROBS
from runtime.core.sequence import Sequence as Running
from runtime.graphs.capture import capture
from runtime.graphs.host_copy import HostCopy
from runtime.kv.cache import PagedCache
from runtime.kv.pages import pages_for
from runtime.models.model import Model
from runtime.replay.slots import BatchSlots
from runtime.sampling.on_device import ALL_FEATURES, DeviceSampler, SamplingFeatures
from runtime.sampling.reference import Draw, SamplingRow

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes, in slots, for which graphs are captured. Beyond 256 they grow by a factor of 1.5."""
CAPTURED_FEATURES = (
    SamplingFeatures(random=False, processing=False, logprobs=False),
    SamplingFeatures(random=True, processing=False, logprobs=False),
    ALL_FEATURES,
)
"""Sampling features for which graphs are captured: greedy, random without bias or penalties, and
all features (used for every other combination)."""
UNRESOLVED = Draw(-1)
"""Placeholder for a slot that did not advance. The next launched step samples its token again."""


@dataclass(frozen=True)
class SlotAssignment:
    """Batch slots of a step's sequences. Consecutive steps often share an assignment.

    Attributes:
        slots: the slot of each sequence.
        bucket: number of leading slots that the step computes.
        features: sampling features of the graph.
    """

    sequences: list[Running]
    slots: list[int]
    bucket: int
    features: SamplingFeatures


@dataclass(frozen=True)
class InFlightStep:
    """A launched step whose results the host has not read yet."""

    replay: "DecodeReplay"
    assignment: SlotAssignment
    results: HostCopy

    @property
    def sequences(self) -> list[Running]:
        return self.assignment.sequences


class DecodeReplay:
    """Replayed decode steps of one model over one cache.

    Args:
        cache: KV pages. The last page must be the null page, which is allocated to no sequence;
            unassigned slots write to it.
        max_sequences: maximum number of sequences in a step: the number of batch slots.
        by_layer: whether to capture a graph for each layer, as FlashSVD v1.5 does, instead of one
            for the whole step. The decode megakernel is then not used.

    Raises:
        ValueError: the model's attention reads lengths on the host, which a graph cannot capture.
    """

    def __init__(
        self, model: Model, cache: PagedCache, max_sequences: int, *, by_layer: bool = False
    ) -> None:
        if model.device.type == "cuda" and not model.kv_format.graph_safe:
            raise ValueError(f"KV format {model.kv_format.name} cannot run in a CUDA graph")
        self._model, self._cache, self._by_layer = model, cache, by_layer
        device, pages = model.device, len(cache.planes[0])
        buckets = list(BUCKETS)
        while buckets[-1] < max_sequences:
            buckets.append(buckets[-1] * 3 // 2)
        self._buckets = [bucket for bucket in buckets if bucket < max_sequences] + [max_sequences]
        max_pages = pages_for(model.context_length, model.page_size)
        self._slots = BatchSlots(max_sequences, max_pages, pages - 1, device)
        self._order = torch.arange(max_sequences + 1, device=device)
        vocab = model.config.vocab_size
        self._sampler = DeviceSampler(max_sequences, vocab, device, top=MAX_LOGPROBS)
        self._logits = torch.zeros(max_sequences, vocab, dtype=torch.float32, device=device)
        sampler = self._sampler
        self._results = [
            sampler.sampled, sampler.logprobs, sampler.top_logprobs, sampler.top_tokens
        ]  # fmt: skip
        self._host_copies = cycle(HostCopy(self._results) for _ in range(2))
        self._steps: dict[tuple[int, SamplingFeatures], Callable[[], object]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._assignment = SlotAssignment([], [], 0, SamplingFeatures.of([]))
        self._latest: InFlightStep | None = None

    def can_launch_ahead(self, sequences: list[Running]) -> bool:
        """Return whether a step of these sequences may be launched before the last one is read.

        Return False if sequences should first move to lower slots so that a smaller bucket
        suffices. To move a sequence, the host must have read all of its tokens.
        """
        smallest = self._bucket_of(len(sequences))
        if sequences == self._assignment.sequences:
            return self._assignment.bucket <= smallest
        return self._bucket_of(self._slots.extent(sequences)) <= smallest

    def launch(self, sequences: list[Running]) -> InFlightStep:
        """Launch a step that samples the next token of each sequence.

        A sequence with a token in flight must have been part of the previous step.
        """
        assignment = self._assignment
        bucket = self._bucket_of(len(sequences))
        if sequences != assignment.sequences or assignment.bucket > bucket:
            assignment = self._assignment = self._assign(sequences)
        if joined := self._slots.update(sequences):
            self._sampler.load(
                list(joined), [SamplingRow.of(sequence) for sequence in joined.values()]
            )
        self._run(assignment.bucket, assignment.features)
        self._latest = InFlightStep(self, assignment, next(self._host_copies))
        self._start_copy(self._latest)
        return self._latest

    def collect(self, step: InFlightStep) -> list[Draw | None]:
        """Wait for the tokens of a step. At most one other step may have been launched after it.

        Returns:
            One item per sequence: its draw, None if its logits are not finite, or `UNRESOLVED` if
            its slot did not advance.
        """
        assignment = step.assignment
        results = step.results.wait()
        sampled = results[0][: assignment.bucket].tolist()
        missing = [slot for slot in assignment.slots if sampled[slot][1] and not sampled[slot][2]]
        if missing and step is self._latest:
            self._sampler.resolve(self._logits, missing)
            self._slots.advance(missing, self._sampler.tokens)
            self._start_copy(step)
            sampled = step.results.wait()[0][: assignment.bucket].tolist()
        return self._draws(assignment, sampled, results)

    def warm_up(self, progress: Callable[[int], None]) -> None:
        """Capture all graphs, the largest bucket first, so that the others reuse its memory.

        Call it before the first `launch`.

        Args:
            progress: called with the size of each captured bucket.
        """
        for bucket in reversed(self._buckets):
            for features in CAPTURED_FEATURES:
                self._run(bucket, features)
            progress(bucket)

    def _bucket_of(self, slots: int) -> int:
        return self._buckets[bisect_left(self._buckets, slots)]

    def _assign(self, sequences: list[Running]) -> SlotAssignment:
        slots = self._slots.assign(sequences, self._bucket_of(len(sequences)))
        features = SamplingFeatures.of(sequence.request.sampling for sequence in sequences)
        features = features if features in CAPTURED_FEATURES else ALL_FEATURES
        return SlotAssignment(sequences, slots, self._bucket_of(max(slots) + 1), features)

    def _run(self, bucket: int, features: SamplingFeatures) -> None:
        key = bucket, features
        if key not in self._steps:
            self._steps[key] = self._captured(bucket, features)
        self._steps[key]()

    def _captured(self, bucket: int, features: SamplingFeatures) -> Callable[[], object]:
        """Capture a step as one graph or several.

        The step runs once before the capture, and its effects on the state are undone.
        """
        parts = self._parts(bucket, features)

        def run() -> None:
            for part in parts:
                part()

        if self._model.device.type != "cuda":
            return run
        state = [self._slots.state, *self._sampler.state]
        saved = [tensor.clone() for tensor in state]
        run()
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)
        if not self._by_layer:
            return capture(run, self._pool)
        parts = [capture(part, self._pool) for part in parts]
        return run

    def _parts(self, bucket: int, features: SamplingFeatures) -> Sequence[Callable[[], object]]:
        """Return the parts of a step, in order. With ``by_layer``, each is captured separately."""
        leading, slots = slice(bucket), self._slots
        batch = self._batch(bucket)
        if self._by_layer:
            *stages, logits_of = self._model.stages(batch, self._cache)
        else:
            stages, logits_of = [], self._model.static_step(batch, self._cache)
        return [
            lambda: torch.add(slots.positions[leading], 1, out=slots.lengths[leading]),
            *stages,
            lambda: self._sample(bucket, features, logits_of()),
        ]

    def _batch(self, bucket: int) -> Batch:
        """Return the leading slots as a batch of static tensors."""
        leading, slots = slice(bucket), self._slots
        return Batch(
            tokens=slots.tokens[leading],
            positions=slots.positions[leading],
            page_table=slots.page_table[leading],
            starts=self._order[: bucket + 1].int(),
            lengths=slots.lengths[leading],
            sequences=self._order[leading].int(),
            logit_rows=self._order[leading],
            single=True,
        )

    def _sample(self, bucket: int, features: SamplingFeatures, logits: Tensor) -> None:
        """Sample from logits ``[bucket, vocab]``, and advance the slots whose tokens were drawn."""
        leading, slots, sampler = slice(bucket), self._slots, self._sampler
        if features.random:
            self._logits[leading] = logits
        sampler(logits, features)
        advanced = slots.active[leading] * sampler.resolved[leading]
        slots.tokens[leading] = torch.where(
            advanced > 0, sampler.tokens[leading], slots.tokens[leading]
        )
        slots.positions[leading] += advanced

    def _start_copy(self, step: InFlightStep) -> None:
        assignment = step.assignment
        tensors = self._results[: None if assignment.features.logprobs else 1]
        step.results.start(tensors, assignment.bucket)

    def _draws(
        self, assignment: SlotAssignment, sampled: list[list[int]], results: list[Tensor]
    ) -> list[Draw | None]:
        draws: list[Draw | None] = []
        for sequence, slot in zip(assignment.sequences, assignment.slots, strict=True):
            token, finite, resolved = sampled[slot]
            num_top = sequence.request.sampling.logprobs
            if not finite:
                draws.append(None)
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
