"""An executor of two ranks in one process, of which the second one is fed through a channel."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from runtime.core.options import EngineOptions
from runtime.core.plan import StepPlan
from runtime.core.request import PromptLogprobs
from runtime.core.sequence import SequenceState
from runtime.engine import Executor, LocalExecutor, Ranks, StepChannel
from runtime.engine.channel import Follower
from runtime.engine.executor import LaunchedStep
from runtime.engine.plan_fields import NOT_READ, SENT
from runtime.grammar.masks import TokenMasks
from runtime.models.model import Model
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress


def what_executors_read(value: Any) -> Any:
    """Return a copy of a plan, or of a part of it, that has the fields in `SENT` only."""
    match value:
        case list() | deque() | tuple():
            return [what_executors_read(item) for item in value]
        case Mapping():
            return dict(value)
    names = SENT.get(type(value))
    if names is None:
        return value
    return {name: what_executors_read(getattr(value, name)) for name in names}


class Unread:
    """Value of a field that executors do not read. It fails if it is used."""

    def _fail(self, *_: object) -> NoReturn:
        raise AssertionError("an executor reads a field that is not sent")

    __bool__ = __len__ = __iter__ = __index__ = __int__ = __float__ = __hash__ = _fail
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __getitem__ = _fail
    __add__ = __radd__ = __sub__ = __rsub__ = __getattr__ = _fail


def hide_unread(plan: StepPlan) -> StepPlan:
    """Return a plan of copies, in whose sequences and groups all `NOT_READ` fields are `Unread`."""
    groups = [chunk.group for chunk in plan.chunks]
    sequences = [*plan.decode, *(sequence for group in groups for sequence in group.sequences)]
    requests = [sequence.request for sequence in sequences]
    for part in (*groups, *sequences, *requests):
        for name in NOT_READ[type(part)]:
            object.__setattr__(part, name, Unread())
    return replace(plan, **{name: Unread() for name in NOT_READ[StepPlan]})  # type: ignore[arg-type]


class SecondRank(LocalExecutor):
    """Checks its plans.

    Attributes:
        expected: what executors read of the next plan.
    """

    expected: Any = None
    launches = 0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        assert what_executors_read(plan) == self.expected
        self.launches += 1
        return super().launch(hide_unread(plan))


@dataclass(frozen=True)
class MirroredStep:
    ranks: "Mirrored"
    step: LaunchedStep

    @property
    def ready(self) -> int:
        return self.step.ready

    def sample(self, masks: TokenMasks) -> None:
        self.step.sample(masks)
        self.ranks.execute_next()

    def read(self) -> list[Draw | None]:
        draws = self.step.read()
        self.ranks.execute_next()
        self.ranks.execute_next()
        return draws

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        return self.step.prompt_logprobs()


class Mirrored(Executor):
    """Executes each call on two executors of one model: on the second after it was sent.

    Both compute the whole model, so that tokens, events and KV are equal.
    """

    def __init__(self, model: Model, options: EngineOptions) -> None:
        self.first = LocalExecutor(model, options)
        self.second = SecondRank(model, options)
        self.follower = Follower(self.second)
        self.channel = StepChannel(1, timeout_s=0)
        self._reader = self.channel.readers[0].messages
        self.ranks = Ranks(self.first, self.channel)
        self.shape = self.ranks.shape
        self.device = self.ranks.device
        self.execute_next()

    def execute_next(self) -> None:
        """Execute a message on the second rank."""
        message = self._reader.read()
        assert message is not None
        self.follower.execute(message)

    def warm_up(self, progress: Progress) -> None:
        self.ranks.warm_up(progress)
        self.execute_next()

    def can_launch_ahead(self, sequences: list[SequenceState]) -> bool:
        return self.ranks.can_launch_ahead(sequences)

    def launch(self, plan: StepPlan) -> MirroredStep:
        self.second.expected = what_executors_read(plan)
        step = self.ranks.launch(plan)
        self.execute_next()
        return MirroredStep(self, step)

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.ranks.copy_pages(group, sources, targets)
        self.execute_next()

    def record_event(self) -> int:
        number = self.ranks.record_event()
        self.execute_next()
        return number

    def check_equal(self) -> None:
        """Check that the second rank has executed all messages and has the same KV."""
        assert self.follower.executed == self.channel.sent
        for own, other in zip(self.first.cache.planes, self.second.cache.planes, strict=True):
            assert own.equal(other)
