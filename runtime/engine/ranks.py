"""The executor of a worker of several ranks, which compute every step together."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.core.plan import StepPlan
from runtime.core.request import PromptLogprobs
from runtime.core.sequence import SequenceState
from runtime.engine.channel import StepChannel
from runtime.engine.executor import Executor, LaunchedStep
from runtime.grammar.masks import TokenMasks
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress


@dataclass(frozen=True)
class RankStep:
    """A step that was launched on every rank.

    Attributes:
        number: number of the step in the channel.
        first: the step of the first rank.
    """

    number: int
    first: LaunchedStep
    channel: StepChannel

    @property
    def ready(self) -> int:
        """Number of the event that every rank records after the step; see `LaunchedStep`."""
        return self.first.ready

    def sample(self, masks: TokenMasks) -> None:
        """Sample the tokens on every rank; the masks are those of all token ids."""
        self.channel.sample(self.number, masks)
        self.first.sample(masks)

    def read(self) -> list[Draw | None]:
        """Wait for the step on the first rank and return its draws.

        Every rank reads, because reading may complete the sampling of a token, which needs the
        logits of all ranks. The other ranks then compare their tokens with those of the first.
        """
        self.channel.read(self.number, self.ready)
        draws = self.first.read()
        self.channel.tokens(draws)
        return draws

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        return self.first.prompt_logprobs()


class Ranks(Executor):
    """Launches every step on all ranks and takes the tokens of the first rank.

    Ranks exchange activations and, for sampling, reductions of their logits. Sampling depends only
    on these and on the plan, so all ranks sample the same tokens.

    A call that may block until all ranks execute it is sent before the first rank executes it.

    Args:
        first: executor of the first rank, in this process.
        channel: sends the calls to the other ranks.
    """

    def __init__(self, first: Executor, channel: StepChannel) -> None:
        self._first = first
        self._channel = channel
        self.shape = first.shape
        self.device = first.device
        channel.start(first.shape)

    def warm_up(self, progress: Progress) -> None:
        self._channel.warm_up()
        self._first.warm_up(progress)

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        return self._first.can_launch_ahead(sequences)

    def launch(self, plan: StepPlan) -> RankStep:
        number = self._channel.launch(plan)
        return RankStep(number, self._first.launch(plan), self._channel)

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._channel.copy_pages(group, sources, targets)
        self._first.copy_pages(group, sources, targets)

    def record_event(self) -> int:
        number = self._first.record_event()
        self._channel.record_event(number)
        return number
