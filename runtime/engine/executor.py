"""Interface between an engine, which schedules, and the ranks that compute its steps.

An engine calls the methods of an executor on one thread, in this order for each step: `launch`,
`copy_pages`, `LaunchedStep.sample` for some steps, and later `LaunchedStep.read`. An executor
changes nothing in a plan. Between steps, it stores its own state of each sequence under
`SequenceState.arrival`. A rank in another process therefore computes copies of the plans, which
`runtime.engine.channel` sends to its executor.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.config import ModelConfig
from runtime.core.options import EngineOptions
from runtime.core.plan import StepPlan
from runtime.core.request import PromptLogprobs
from runtime.core.sequence import SequenceState
from runtime.grammar.masks import TokenMasks
from runtime.pages.plan import PagePlan
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress


class LaunchedStep(Protocol):
    """A step whose computation was launched."""

    @property
    def ready(self) -> int:
        """Number of the event recorded once all KV is in the pages, see `PagedCache.events`."""
        ...

    def sample(self, masks: TokenMasks) -> None:
        """Sample the tokens of a step with constrained sequences (`StepPlan.constrained`).

        It is called once for such a step and never for another one, after the launch and after the
        previous step was read. Constrained sequences without a mask get tokens that are not used.
        """
        ...

    def read(self) -> list[Draw | None]:
        """Wait for the step and return a draw for each sequence of `StepPlan.sampled`, in order.

        A draw is None if the logits are not finite. It is `runtime.steps.replay.UNRESOLVED` if the
        token could not be drawn and the next step samples it again.

        All ranks of a worker must call it, in the same order relative to their other calls.
        """
        ...

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """Return the log probabilities of each chunk with `Chunk.scored`, in order.

        Call it after `read`, on the first rank only.
        """
        ...


@dataclass(frozen=True)
class ExecutorShape:
    """Sizes that an engine needs for scheduling. They are equal on all ranks of a worker.

    Attributes:
        config: shape of the model. Ranks that hold some of its heads differ in the numbers of
            heads, which an engine does not read.
        plan: page groups of the KV cache.
        options: options of the engine, such as the numbers of pages.
    """

    config: ModelConfig
    plan: PagePlan
    options: EngineOptions


class Executor(ABC):
    """One rank of a worker: a device with weights, KV pages and the graphs of steps.

    Attributes:
        shape: sizes that limit the steps of the engine.
        device: the rank's device.
    """

    shape: ExecutorShape
    device: torch.device

    @abstractmethod
    def warm_up(self, progress: Progress) -> None:
        """Compile kernels and capture graphs. Call it before the first `launch`."""

    @abstractmethod
    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        """Return whether a step with ``sequences`` may be launched before the last step is read."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step that decodes ``plan.decode`` and computes ``plan.chunks``.

        It samples a token for each of ``plan.sampled``, unless ``plan.constrained``: then
        `LaunchedStep.sample` does. It evicts tokens of the prompts that it
        completes, so that the pages in ``Chunk.vacated`` are empty afterwards. If the KV format has
        a page group for encoded pages, it encodes the pages of complete prompts outside of the
        window.
        """

    @abstractmethod
    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page ``sources[i]`` of a page group to page ``targets[i]``, after launched steps."""

    @abstractmethod
    def record_event(self) -> int:
        """Record an event after which all launched work has completed; see `PagedCache.events`.

        All ranks of a worker return the same number. Another rank may record the event later.
        """
