"""An executor over several ranks, which compute every step together."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.core.plan import StepPlan
from runtime.core.sequence import SequenceState
from runtime.engine.executor import Executor, LaunchedStep
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress, silent


@dataclass(frozen=True)
class RankSteps:
    """A launched step on every rank, in the order of the ranks."""

    steps: Sequence[LaunchedStep]

    @property
    def ready(self) -> int:
        """Number of the event that every rank records after the step; see `LaunchedStep`."""
        return self.steps[0].ready

    def read(self) -> list[Draw | None]:
        """Wait for all ranks and return the draws of the first.

        Every rank reads, because reading may complete the sampling of a token on its device.
        """
        first, *_ = [step.read() for step in self.steps]
        return first


class Ranks(Executor):
    """Launches every step on all ranks and takes the tokens of the first rank.

    Ranks exchange activations, so that all of them have the same logits. Sampling depends on these
    and on the plan alone; all ranks therefore sample the same tokens.

    Args:
        ranks: the executors. At most one is in this process, and it must be the first. Its methods
            are called last, because they may block until all ranks have launched a step. Executors
            of other processes block only in `LaunchedStep.read`.

    Raises:
        ValueError: the shapes of ranks differ in more than the numbers of heads.
    """

    def __init__(self, ranks: Sequence[Executor]) -> None:
        first, *others = ranks
        self._first = first
        self._others = others
        self.shape = first.shape
        self.device = first.device
        for other in others:
            _check_alike(first, other)

    def warm_up(self, progress: Progress) -> None:
        for other in self._others:
            other.warm_up(silent)
        self._first.warm_up(progress)

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        return self._first.can_launch_ahead(sequences)

    def launch(self, plan: StepPlan) -> RankSteps:
        others = [other.launch(plan) for other in self._others]
        return RankSteps([self._first.launch(plan), *others])

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        for rank in (*self._others, self._first):
            rank.copy_pages(group, sources, targets)

    def record_event(self) -> int:
        for other in self._others:
            other.record_event()
        return self._first.record_event()


def _check_alike(first: Executor, other: Executor) -> None:
    for name in ("plan", "options"):
        if getattr(first.shape, name) != getattr(other.shape, name):
            raise ValueError(f"ranks with different {name}: {first.shape} and {other.shape}")
