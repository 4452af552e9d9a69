"""Sampling for batch slots, replayed as CUDA graphs.

A forward pass writes the logits of each slot to `SlotSampler.logits`. `SlotSampler.run` then
samples a token for each slot and makes it the slot's next input, all on the device. A graph is
captured for each bucket (number of leading slots, `slot_buckets`) and each set of sampling
features, at first use or by `SlotSampler.warm_up`. On the CPU the same operations run without a
graph.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.core.request import MAX_LOGPROBS
from runtime.core.sequence import SequenceState
from runtime.grammar.masks import MaskWords
from runtime.graphs.capture import captured
from runtime.graphs.host_copy import HostCopy
from runtime.layers.vocabulary import Vocabulary
from runtime.sampling.on_device import ALL_FEATURES, DeviceSampler, SamplingFeatures
from runtime.sampling.reference import SamplingRow
from runtime.steps.slots import BatchSlots

CAPTURED_FEATURES = (
    SamplingFeatures(random=False, processing=False, logprobs=False),
    SamplingFeatures(random=True, processing=False, logprobs=False),
    SamplingFeatures(random=False, processing=False, logprobs=False, masking=True),
    SamplingFeatures(random=True, processing=False, logprobs=False, masking=True),
    ALL_FEATURES,
)
"""Sampling features for which graphs are captured: greedy, and random without bias or penalties,
both with and without masks, and all features (used for every other combination)."""


class SlotSampler:
    """Samples the next token of every batch slot.

    Args:
        pool: memory pool of the graphs; None on the CPU.

    Attributes:
        logits: logits of this rank's tokens, fp32 `[max_slots, own]`, written by the forward pass
            before `run`.
    """

    def __init__(self, slots: BatchSlots, vocabulary: Vocabulary, pool: Any) -> None:
        self._slots = slots
        self._pool = pool
        rows = len(slots.tokens)
        device = slots.tokens.device
        self._sampler = DeviceSampler(rows, vocabulary, device, top=MAX_LOGPROBS)
        own = len(vocabulary.own)
        self.logits = torch.zeros(rows, own, dtype=torch.float32, device=device)
        self._runs: dict[tuple[int, SamplingFeatures], Callable[[], object]] = {}

    @staticmethod
    def features_of(sequences: Iterable[SequenceState]) -> SamplingFeatures:
        """Return the features of all sequences; all features if no graph is captured for them."""
        features = SamplingFeatures.of([sequence.request.sampling for sequence in sequences])
        return features if features in CAPTURED_FEATURES else ALL_FEATURES

    @property
    def results(self) -> list[Tensor]:
        """``sampled``, ``logprobs``, ``top_logprobs`` and ``top_tokens`` of the `DeviceSampler`."""
        sampler = self._sampler
        return [sampler.sampled, sampler.logprobs, sampler.top_logprobs, sampler.top_tokens]

    def load(self, joined: Mapping[int, SequenceState]) -> None:
        """Load the sampling state of the sequences in ``joined``, by slot."""
        rows = [SamplingRow.of(sequence) for sequence in joined.values()]
        self._sampler.load(list(joined), rows)

    def load_masks(self, slots: Sequence[int], masks: MaskWords) -> None:
        """Set the masks of slots for the next `run`; see `DeviceSampler.load_masks`."""
        self._sampler.load_masks(slots, masks)

    def run(self, bucket: int, features: SamplingFeatures) -> None:
        """Sample a token for each of the first ``bucket`` slots, and advance these slots."""
        key = bucket, features
        if key not in self._runs:
            self._runs[key] = self._captured(bucket, features)
        self._runs[key]()

    def start_copy(self, copy: HostCopy, bucket: int, features: SamplingFeatures) -> None:
        """Start copying the results of the first ``bucket`` slots to the host."""
        copy.start(self.results[: None if features.logprobs else 1], bucket)

    def resolve(self, slots: list[int]) -> None:
        """Draw the tokens that the last `run` left unresolved, and advance their slots."""
        self._sampler.resolve(self.logits, slots)
        self._slots.advance(slots, self._sampler.tokens)

    def warm_up(self, buckets: Iterable[int]) -> None:
        """Capture all graphs for the given numbers of slots, without an effect on the slots."""
        for bucket in buckets:
            for features in CAPTURED_FEATURES:
                self.run(bucket, features)

    def _captured(self, bucket: int, features: SamplingFeatures) -> Callable[[], object]:
        """Capture a graph.

        The operations run once before the capture, and their effects are undone.
        """
        state = [self._slots.state, *self._sampler.state]
        saved = [tensor.clone() for tensor in state]
        run = captured(partial(self._sample, bucket, features), self._pool)
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)
        return run

    def _sample(self, bucket: int, features: SamplingFeatures) -> None:
        leading = slice(bucket)
        slots = self._slots
        sampler = self._sampler
        sampler(self.logits[leading], features)
        advanced = slots.active[leading] * sampler.resolved[leading]
        slots.tokens[leading] = torch.where(
            advanced > 0, sampler.tokens[leading], slots.tokens[leading]
        )
        slots.positions[leading] += advanced
