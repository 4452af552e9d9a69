"""Interface of the classes that compute the steps of a rank."""

from typing import Protocol

from runtime.core.plan import StepPlan
from runtime.core.sequence import SequenceState
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress


class LaunchedStep(Protocol):
    """A step whose computation was launched."""

    @property
    def ready(self) -> int:
        """Number of the event of the cache recorded once all KV is in the pages."""
        ...

    def read(self) -> list[Draw | None]:
        """Wait for the step and return a draw for each of the plan's ``sampled``.

        A draw is None if the logits are not finite, and `UNRESOLVED` if the next step samples the
        token again.
        """
        ...


class StepRunner(Protocol):
    """Computes steps of one model over one cache.

    Attributes:
        lookahead: whether a step should be launched before the previous one is read.
    """

    lookahead: bool

    def warm_up(self, progress: Progress) -> None:
        """Prepare for all steps, so that the first ones are not delayed."""
        ...

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        """Return whether a step that decodes ``sequences`` may be launched before reading."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step; see `runtime.engine.Executor.launch`."""
        ...
