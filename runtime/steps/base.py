"""Interface of the classes that compute the steps of a rank."""

from collections.abc import Sequence
from typing import Protocol

import torch

from runtime.core.plan import Chunk
from runtime.core.sequence import SequenceState
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress


class LaunchedStep(Protocol):
    """A step whose computation was launched."""

    @property
    def sequences(self) -> list[SequenceState]:
        """Sequences for which the step samples a token, without those with forced tokens."""
        ...

    @property
    def ready(self) -> torch.cuda.Event | None:
        """CUDA event recorded once all KV is in the pages; None if it is there already."""
        ...

    def read(self) -> list[Draw | None]:
        """Wait for the step and return a draw for each sequence.

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

    def launch(self, decode: list[SequenceState], chunks: Sequence[Chunk]) -> LaunchedStep:
        """Launch a step that decodes sequences and computes prompt chunks.

        It samples a token for each decoded sequence and for all choices of completed prompts,
        except those whose next token is forced. With a compressed KV format, it also encodes the
        pages that complete prompts leave outside of their windows.
        """
        ...
