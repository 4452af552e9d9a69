"""KV of cached pages in the search: engines without a model that know what each page holds.

The KV of a token depends on all tokens before it. It is therefore named by these tokens. Each step
checks that it attends to the right KV, and that it writes only to pages that no other sequence uses
or finds.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.plan import StepPlan
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import FREED, Purpose, SequenceGroup, SequenceState
from runtime.engine import Add, Command, Engine, ExecutorShape, StepOutput
from runtime.pages.plan import PageCount, PagePlan
from runtime.pages.pool import PagePool
from tests.runtime.engine.fake_executor import FakeExecutor, FakeStep
from tests.runtime.tiny import CONFIG
from tests.services.transfer.protocol.paged_engine import Thread
from tests.services.transfer.protocol.parts import Violation

PAGE_SIZE = 2
LIMITS = Limits(max_running=16, max_waiting=16, step_tokens=64, chunk_tokens=64)


@dataclass(frozen=True)
class Prompt:
    """A request.

    Attributes:
        outputs: number of output tokens of each choice.
        decode: number of the decode worker on which it starts, from 0.
    """

    tokens: tuple[int, ...]
    outputs: int = 2
    choices: int = 1
    decode: int = 0


@dataclass(frozen=True)
class CacheBounds:
    """Sizes of a search of cached pages, between one prefill worker and decode workers.

    Attributes:
        requests: requests. Those of a decode worker start in this order, at any time.
        decodes: number of decode workers.
        cached: request that each decode worker has answered before the search; None for none.
        prefill_pages, decode_pages: pages of each worker. A page has 2 tokens.
        ways: ways in which a stream starts: it asks for KV "early", or "with pages".
        slots: slots of each worker's slab for prompts; there are as many for history.
        faults: maximum number of faults in one run.
        kinds: names of the faults that can happen; see `CachedWorld`.
    """

    requests: tuple[Prompt, ...]
    decodes: int = 1
    cached: Prompt | None = None
    prefill_pages: int = 4
    decode_pages: int = 6
    ways: tuple[str, ...] = ("early", "with pages")
    slots: int = 2
    faults: int = 0
    kinds: frozenset[str] = frozenset()


@cache
def kv_names(tokens: tuple[int, ...]) -> tuple[str, ...]:
    """Return the name of the KV of each token."""
    return tuple(".".join(map(str, tokens[: end + 1])) for end in range(len(tokens)))


class KVExecutor(FakeExecutor):
    """Samples the same token for every sequence, and records which KV each page holds.

    Attributes:
        pool: pages of the engine; set by `CachedThread`.
        kv: names of the KV in each page, by its tokens.
    """

    pool: PagePool

    def __init__(self, pages: int) -> None:
        options = EngineOptions(PageCount(pages), LIMITS, prefix_root=b"model")
        self.shape = ExecutorShape(CONFIG, PagePlan(PAGE_SIZE), options)
        self.device = torch.device("cpu")
        self.kv = [[""] * PAGE_SIZE for _ in range(pages)]

    def launch(self, plan: StepPlan) -> FakeStep:
        for chunk in plan.chunks:
            sequences = chunk.group.sequences
            self._attend(sequences[0], chunk.first)
            self._write(sequences, range(chunk.first, chunk.end))
        for sequence in plan.decode:
            self._attend(sequence, sequence.length - 1)
            self._write([sequence], range(sequence.length - 1, sequence.length))
        return super().launch(plan)

    def copy_pages(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if target == source:
                raise Violation(f"choices share page {source}, which is partly filled")
            self.kv[target] = [*self.kv[source]]

    def check_writable(self, page: int, sequences: Iterable[SequenceState]) -> None:
        """Check that ``sequences`` alone use a page, and that no other sequence can find it."""
        own = sum(table.count(page) for sequence in sequences for table in sequence.page_tables)
        if self.pool._references[page] != own:
            raise Violation(f"page {page} is written to, but other sequences use it")
        if self.pool._hashes[page] is not None:
            raise Violation(f"page {page} is written to, but other sequences can find it")

    def _attend(self, sequence: SequenceState, end: int) -> None:
        """Check the KV of the first ``end`` tokens of a sequence."""
        expected = kv_names(tuple(sequence.tokens))
        for at in range(end):
            page = sequence.page_tables[0][at // PAGE_SIZE]
            found = self.kv[page][at % PAGE_SIZE]
            if found != expected[at]:
                raise Violation(
                    f"a sequence attends to {found or 'nothing'!r} as {expected[at]!r}, in page "
                    f"{page}"
                )

    def _write(self, sequences: Sequence[SequenceState], positions: range) -> None:
        first = sequences[0]
        names = kv_names(tuple(first.tokens))
        for at in positions:
            page = first.page_tables[0][at // PAGE_SIZE]
            self.check_writable(page, sequences)
            self.kv[page][at % PAGE_SIZE] = names[at]


class CachedThread(Thread):
    """The engine thread of a worker with cached pages; the search takes its steps.

    Args:
        pages: number of pages of the worker.
    """

    def __init__(self, pages: int) -> None:
        self.executor = KVExecutor(pages)
        super().__init__(Engine(self.executor))
        self.executor.pool = self.pool
        self.page_plan = self.executor.shape.plan

    @property
    def pool(self) -> PagePool:
        """The pages."""
        return self.engine.scheduler.pages.pools[0]

    def cached_tokens(self, request: Request, purpose: Purpose = Purpose.RECEIVE) -> int:
        return self.engine.scheduler.cached_tokens(request, purpose)

    def answer(self, prompt: Prompt) -> None:
        """Serve a request alone, before the search."""
        tokens = prompt.tokens
        self.submit(Add(Request("cached", tokens, len(tokens), SamplingParams(), prompt.outputs)))
        while self.inputs:
            self.plan()
            self.compute()

    def plan(self) -> StepOutput:
        """Plan a step. Pages that it allocates hold nothing."""
        before = [*self.pool._references]
        output = super().plan()
        self._clear(page for page, references in enumerate(before) if not references)
        return output

    def compute(self) -> StepOutput:
        output = super().compute()
        self._clear(page for page in range(self.pool.total) if not self.pool._references[page])
        return output

    def _clear(self, pages: Iterable[int]) -> None:
        """Forget what pages without findable content hold."""
        for page in pages:
            if self.pool._hashes[page] is None:
                self.executor.kv[page] = [""] * PAGE_SIZE

    def check_pages(self) -> None:
        """Check that each page has as many references as sequences that use it.

        Raises:
            Violation: it has more or fewer.
        """
        scheduler = self.engine.scheduler
        grouped = chain.from_iterable(group.sequences for group in scheduler._groups())
        used = Counter(
            page
            for sequence in chain(scheduler._running, grouped)
            for page in chain.from_iterable(sequence.page_tables)
            if page != FREED
        )
        for page, references in enumerate(self.pool._references):
            if references < used[page]:
                raise Violation(
                    f"{used[page]} sequences use page {page}, which has {references} references"
                )
            if references > used[page]:
                raise Violation(f"page {page} is never freed: no sequence uses it")

    def read(self, pages: Sequence[int], tokens: int) -> list[str]:
        """Return the names of the KV of the first ``tokens`` tokens of pages, to be sent."""
        return list(chain.from_iterable(self.executor.kv[page] for page in pages))[:tokens]

    def write(self, pages: Sequence[int], kv: Sequence[str]) -> None:
        """Write KV that was received to pages of a sequence that waits for it."""
        for at, name in enumerate(kv):
            page = pages[at // PAGE_SIZE]
            groups = self.engine.scheduler._received.values()
            owners = [g for g in groups if page in g.sequences[0].page_tables[0]]
            if not owners:
                raise Violation(f"page {page} is written to, but no sequence waits for its KV")
            self.executor.check_writable(page, owners[0].sequences)
            self.executor.kv[page][at % PAGE_SIZE] = name

    @property
    def state(self) -> tuple[object, ...]:
        """State of the engine, with the pages and what they hold."""
        scheduler, pool = self.engine.scheduler, self.pool
        queues = scheduler._waiting, scheduler._prefilling, scheduler._received.values()
        return (
            *([_group_state(group) for group in each] for each in queues),
            [_group_state(group) for group in scheduler._held.values()],
            [_sequence_state(sequence) for sequence in scheduler._running],
            sorted(scheduler._unfinished.items()),
            [group.request.id for group in scheduler._waiting._fresh],
            [_command_state(command) for command in self._inbox],
            (pool._references, pool._hashes, list(pool._blank), list(pool._cached)),
            self.executor.kv,
        )


def _group_state(group: SequenceGroup) -> tuple[object, ...]:
    return (
        *(group.purpose.value, group.computed, group.reused, group.may_reuse, group.may_compute),
        *(group.receives, group.worth, [_sequence_state(each) for each in group.sequences]),
    )


def _sequence_state(sequence: SequenceState) -> tuple[object, ...]:
    return (
        *(sequence.request.id, sequence.choice, len(sequence.tokens), sequence.page_tables),
        *(len(sequence.forced), sequence.cancelled, sequence.hashes is None),
    )


def _command_state(command: Command) -> tuple[object, ...]:
    names = "may_reuse", "may_compute", "receives", "worth", "complete"
    request = getattr(command, "request", None)
    key = command.id if request is None else request.id  # type: ignore[union-attr]
    return type(command).__name__, key, *(getattr(command, name, None) for name in names)
