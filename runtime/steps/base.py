"""Interface of a launched step."""

from typing import Protocol

from runtime.sampling.reference import Draw


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
