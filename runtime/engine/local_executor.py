"""The executor of a rank in this process."""

from collections.abc import Sequence

import torch

from runtime.core.limits import Limits
from runtime.core.plan import StepPlan
from runtime.core.sequence import SequenceState
from runtime.engine.executor import Executor, ExecutorShape
from runtime.kv.eviction import check_eviction
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.steps.base import LaunchedStep, StepRunner
from runtime.steps.direct import DirectSteps
from runtime.steps.replay import StepReplay
from runtime.steps.warm_up import Progress


class LocalExecutor(Executor):
    """Computes steps of a model over its own pages.

    Args:
        pages: number of pages of each page group, for sequences.
        replay: whether to use `StepReplay` (CUDA graphs). Without it, the host takes longer to
            launch kernels than the device takes to run them. Replay does not change tokens, but
            they are reported one step later.
        decodes: whether the executor decodes. False on a prefill worker, which needs no graphs of
            passes that decode.
        by_layer: whether to capture a decode graph for each layer instead of one for the step.

    Attributes:
        model: the model, or the rank's part of it.
        cache: KV pages; with replay, those for sequences precede null pages.
        steps: computes the steps.

    Raises:
        ValueError: there are numbers of pages for other page groups than the cache has.
    """

    def __init__(
        self,
        model: Model,
        *,
        pages: PageCount,
        limits: Limits,
        replay: bool = False,
        decodes: bool = True,
        by_layer: bool = False,
    ) -> None:
        self.model = model
        self.device = model.device
        plan = model.layout.plan
        self.cache = model.new_cache(pages.plus(plan.null_pages) if replay else pages)
        self.steps: StepRunner
        if replay:
            self.steps = StepReplay(model, self.cache, limits, decodes=decodes, by_layer=by_layer)
        else:
            self.steps = DirectSteps(model, self.cache, limits)
        self.lookahead = self.steps.lookahead
        self.shape = ExecutorShape(model.config, plan, pages, limits)

    def check_eviction(self) -> None:
        check_eviction(self.model.kv_format, self.model.config.windows)

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

    def record_event(self) -> int | None:
        return self.cache.events.record()
