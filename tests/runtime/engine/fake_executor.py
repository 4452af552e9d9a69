"""An executor without a device, for tests of what engines plan and report."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.plan import StepPlan
from runtime.core.request import PromptLogprobs
from runtime.core.sequence import SequenceState
from runtime.engine import Executor, ExecutorShape
from runtime.grammar.masks import TokenMasks
from runtime.pages.plan import PageCount, PagePlan
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress
from tests.runtime.tiny import CONFIG

PAGE_SIZE = 16
TOKEN = 1


class FakeStep(NamedTuple):
    """A step that samples `TOKEN`.

    Attributes:
        sampled: number of sequences for which it samples a token.
    """

    sampled: int
    ready: int = 0

    def sample(self, masks: TokenMasks) -> None:
        """There are no constrained sequences."""

    def read(self) -> list[Draw | None]:
        return [Draw(TOKEN)] * self.sampled

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        return []


class FakeExecutor(Executor):
    """Samples `TOKEN` for every sequence. It has pages of one group."""

    def __init__(self, pages: int, limits: Limits, *, lookahead: bool = False) -> None:
        options = EngineOptions(PageCount(pages), limits, replay=lookahead)
        self.shape = ExecutorShape(CONFIG, PagePlan(PAGE_SIZE), options)
        self.device = torch.device("cpu")

    def warm_up(self, progress: Progress) -> None:
        progress("decode", self.shape.options.limits.max_running)

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        return self.shape.options.replay

    def launch(self, plan: StepPlan) -> FakeStep:
        return FakeStep(len(plan.sampled))

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """There is nothing in the pages."""

    def record_event(self) -> int:
        return 0
