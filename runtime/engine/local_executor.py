"""The executor of a rank in this process."""

from collections.abc import Sequence

import torch

from runtime.core.options import EngineOptions
from runtime.core.plan import StepPlan
from runtime.core.sequence import SequenceState
from runtime.engine.executor import Executor, ExecutorShape, LaunchedStep
from runtime.kv.eviction import check_eviction
from runtime.models.model import Model
from runtime.steps.direct import DirectSteps
from runtime.steps.replay import StepReplay
from runtime.steps.warm_up import Progress


class LocalExecutor(Executor):
    """Computes steps of a model over its own pages.

    Attributes:
        model: the model, or the rank's part of it.
        cache: KV pages; with replay, null pages follow those for sequences.
        steps: computes the steps, with ``options.replay`` a `StepReplay`.

    Raises:
        KVFormatError: the KV format or the model does not support eviction.
        ValueError: ``options.pages`` does not have one number for each page group of the cache.
    """

    def __init__(self, model: Model, options: EngineOptions) -> None:
        if options.kv_eviction:
            check_eviction(model.kv_format, model.config.windows)
        self.model = model
        self.device = model.device
        plan = model.layout.plan
        pages = options.pages
        if len(pages) != len(plan.groups):
            raise ValueError(f"{len(pages)} numbers of pages for {len(plan.groups)} page groups")
        self.cache = model.new_cache(pages.plus(plan.null_pages) if options.replay else pages)
        self.steps: StepReplay | DirectSteps = (
            StepReplay(model, self.cache, options)
            if options.replay
            else DirectSteps(model, self.cache, options.limits)
        )
        self.shape = ExecutorShape(model.config, plan, options)

    @torch.inference_mode()
    def warm_up(self, progress: Progress) -> None:
        """See `Executor`. On a CPU it does nothing."""
        if self.device.type != "cpu":
            self.steps.warm_up(progress)

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        return self.steps.can_launch_ahead(sequences)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self.steps.launch(plan)

    @torch.inference_mode()
    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.cache.copy_pages(group, sources, targets)

    def record_event(self) -> int:
        return self.cache.events.record()
