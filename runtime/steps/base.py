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
        """Number of the event recorded once all KV is in the pages, see `PagedCache.events`."""
        ...

    def read(self) -> list[Draw | None]:
        """Wait for the step and return a draw for each sequence of `StepPlan.sampled`, in order.

        A draw is None if the logits are not finite. It is `replay.UNRESOLVED` if the token could
        not be drawn and the next step samples it again.
        """
        ...


class StepRunner(Protocol):
    """Computes steps of one model over one cache."""

    def warm_up(self, progress: Progress) -> None:
        """Prepare for all steps, so that the first ones are not delayed."""
        ...

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        """Return whether a step with ``sequences`` may be launched before the last step is read."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step; see `runtime.engine.Executor.launch`."""
        ...
