"""Engines of the search of pages: the product's, without a model, one step at a time."""

from dataclasses import dataclass

from runtime.core.limits import Limits
from runtime.core.request import Request
from runtime.core.sequence import SequenceGroup
from runtime.engine import Command, Engine, StepOutput
from services.worker.engine_thread import EngineLoad
from tests.runtime.engine.fake_executor import PAGE_SIZE, FakeExecutor

SLOTS = 16


@dataclass(frozen=True)
class PageBounds:
    """Sizes of a search of pages.

    Attributes:
        decodes: number of decode workers, which share one prefill worker.
        streams: number of streams with fetched KV. Each may start on any decode worker at any time.
        wholes: number of requests that the prefill worker serves alone, at any time.
        prefill_pages, decode_pages: pages of each worker. A page has 16 tokens.
        prompt, outputs: tokens of each request.
        cancels: number of streams with fetched KV that may be cancelled.
        computes: whether decode workers may compute prompts of streams themselves, or mean to, but
            find fewer cached pages than they expected.
    """

    decodes: int = 1
    streams: int = 3
    wholes: int = 0
    prefill_pages: int = 1
    decode_pages: int = 1
    prompt: int = 10
    outputs: int = 2
    cancels: int = 0
    computes: bool = False

    @property
    def ways(self) -> tuple[str, ...]:
        """Ways in which a decode worker starts a stream: it fetches the KV, or computes it."""
        return ("early", "with pages", *(("computed", "evicted") if self.computes else ()))


def engine_of(pages: int) -> Engine:
    """Return an engine with pages of 16 tokens."""
    limits = Limits(SLOTS, max_waiting=64, step_tokens=1024, chunk_tokens=PAGE_SIZE * 4)
    return Engine(FakeExecutor(pages, limits))


class Thread:
    """An `EngineThread` whose steps are taken by the search."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: list[Command] = []
        self.load = self._measure()

    def submit(self, *commands: Command) -> None:
        self._inbox += commands

    def cached_tokens(self, request: Request) -> int:
        return self.engine.scheduler.cached_tokens(request)

    @property
    def inputs(self) -> tuple[tuple[str, ...], ...]:
        """The possible next actions of the thread."""
        if self.engine.planned is not None:
            return (("compute",),)
        return (("plan",),) if self._inbox or self.engine.has_work else ()

    def plan(self) -> StepOutput:
        commands, self._inbox = self._inbox, []
        return self.engine.plan(commands)

    def compute(self) -> StepOutput:
        output = self.engine.compute()
        self.load = self._measure()
        return output

    def _measure(self) -> EngineLoad:
        engine = self.engine
        free, running, waiting = (
            engine.scheduler.pages.free,
            engine.scheduler.num_running,
            engine.scheduler.num_waiting,
        )
        return EngineLoad(0, 0, 0, 0.0, free, running, waiting, 0, 0.0)

    @property
    def held(self) -> int:
        """Pages in use."""
        return self.engine.scheduler.pages.total[0] - self.engine.scheduler.pages.free[0]

    @property
    def state(self) -> tuple[object, ...]:
        """State, in which the ids of pages make no difference."""
        scheduler, planned = self.engine.scheduler, self.engine.planned
        groups = scheduler._waiting, scheduler._prefilling, scheduler._received.values()
        return (
            *([_described(group) for group in each] for each in groups),
            sorted(scheduler._held),
            [
                (s.request.id, len(s.tokens), list(map(len, s.page_tables)))
                for s in scheduler._running
            ],
            [f"{type(command).__name__} {_id_of(command)}" for command in self._inbox],
            self.engine.scheduler.pages.free,
            planned and [c.group.request.id for c in planned.chunks],
            planned and [s.request.id for s in planned.decode],
            (self.load.pages_free, self.load.running, self.load.waiting),
        )


def _id_of(command: Command) -> str:
    return command.request.id if hasattr(command, "request") else command.id


def _described(group: SequenceGroup) -> tuple[str, str, int, int]:
    return group.request.id, group.purpose.value, len(group.tokens), group.computed
