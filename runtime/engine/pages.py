"""Pages of sequences: the pools of one engine, admission, growth and deferred release.

There is a pool for each page group. All pages of a prompt are allocated before its first chunk.
Pages that have left the window of their group are freed after each decode step. While a prompt is
computed, they are freed after each chunk, or after the last chunk if the cache encodes pages.

A page released while steps are in flight becomes free when the latest of them has completed. The
first pages of a prompt may be those of another sequence, see `runtime.engine.prefixes`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.core.plan import Chunk
from runtime.core.sequence import FREED, Purpose, SequenceGroup, SequenceState
from runtime.engine.prefixes import ComputedPages, Prefixes
from runtime.errors import OutOfPages
from runtime.pages.groups import Part
from runtime.pages.plan import PageCount, PagePlan
from runtime.pages.pool import PagePool


@dataclass
class _InFlight:
    """Pages of one step in flight.

    Attributes:
        released: pages of each group that were released since its launch.
        computed: pages whose KV the step computes.
    """

    released: list[list[int]]
    computed: list[ComputedPages] = field(default_factory=list)


class SequencePages:
    """Allocates pages to sequences.

    Args:
        total: number of pages of each group.
        prefix_root: see `EngineOptions`.

    Attributes:
        plan: computes the numbers of pages that sequences need.
        pools: pool of each group.
        prefixes: finds the pages of prompts in the pools.
        total: number of pages of each group, without null pages.
        windows: whether any group has a window, so that pages leave it.

    Raises:
        ValueError: a group has no pages.
    """

    def __init__(self, plan: PagePlan, total: PageCount, prefix_root: bytes | None = None) -> None:
        self.plan = plan
        self.total = total
        self.pools = tuple(PagePool(pages) for pages in total)
        self.prefixes = Prefixes(plan, self.pools, prefix_root)
        groups = enumerate(plan.groups)
        self._windows = [(at, group) for at, group in groups if group.part is Part.ENDS]
        self.windows = bool(self._windows)
        self._in_flight: deque[_InFlight] = deque()

    @property
    def free(self) -> PageCount:
        """Number of free pages."""
        return PageCount(*(pool.free for pool in self.pools))

    def need(self, group: SequenceGroup, choices: int | None = None) -> PageCount:
        """Return the number of free pages needed to admit a group and run one decode step.

        Args:
            choices: number of choices; None for the sequences of the group.
        """
        first = group.sequences[0]
        if group.purpose is Purpose.HOLD:
            return self.plan.computed(len(first.tokens), first.evicts)
        return self.plan.admission(
            len(first.tokens),
            limit=first.limit,
            known=first.known,
            evicted=first.evicts,
            choices=choices or len(group.sequences),
            received=group.purpose is Purpose.RECEIVE,
        )

    def suffice_for(self, group: SequenceGroup) -> bool:
        """Return whether the free pages suffice to admit a group and run one decode step.

        Pages of its prefix that other sequences use need not be free.
        """
        need, free = self.need(group), self.free
        return need.fits(free) or need.minus(self.prefixes.in_use(group)).fits(free)

    def check_fits(self, group: SequenceGroup) -> None:
        """Raise `OutOfPages` if a group needs more pages than there are."""
        need = self.need(group)
        tokens = group.sequences[0].known
        for pages, total, kind in zip(need, self.total, self.plan.groups, strict=True):
            if pages > total:
                name = f"{kind.name} pages" if len(need) > 1 else "pages"
                raise OutOfPages(f"{tokens} tokens need {pages} of {total} {name}")

    def suffice_for_step(self, running: int) -> bool:
        """Return whether the free pages suffice for a step of any ``running`` sequences."""
        return self.plan.step.times(running).fits(self.free)

    def grow(self, sequence: SequenceState, missing: PageCount) -> None:
        """Allocate the missing pages of a running sequence."""
        for table, pool, count in zip(sequence.page_tables, self.pools, missing, strict=True):
            table += pool.allocate(count)

    def admit(self, group: SequenceGroup) -> None:
        """Allocate the pages of a group's prompt, the first pages of its sequences.

        Pages of the longest cached prefix of the prompt are shared, and `SequenceGroup.reused` is
        set. Choices share full pages, but not a partly filled last page. A prompt whose KV another
        worker will send gets only the pages that are sent: no pages that have left a window, and no
        pages of evicted tokens.
        """
        first, *others = group.sequences
        tokens = len(group.tokens)
        received = group.purpose is Purpose.RECEIVE
        if received:
            tokens -= first.evicts
        prefix = self.prefixes.take(group)
        for at, pool in enumerate(self.pools):
            if received:
                ranges = self.plan.sent(tokens, at)
            else:
                ranges = (self.plan.prompt(tokens, at, first.evicts),)
            table = [FREED] * ranges[-1].stop
            for indices, shared in prefix.tables[at]:
                table[indices.start : indices.stop] = shared
            for pages in ranges:
                start, stop = max(pages.start, prefix.pages), max(pages.stop, prefix.pages)
                table[start:stop] = pool.allocate(stop - start)
            first.page_tables.append(table)
        group.reused = prefix.pages * self.plan.page_size
        if group.purpose is not Purpose.HOLD:
            self._share_prompt(first, others, tokens)
        if group.reused and not received:
            self.set_computed(group, group.reused)

    def pin(self, group: SequenceGroup) -> bool:
        """Give a group the cached pages of all full pages before its last token.

        Return whether all of them are cached; otherwise the group gets none.
        """
        prefix = self.prefixes.pin(group)
        if prefix is None:
            return False
        for held in prefix.tables:
            table = [FREED] * prefix.pages
            for indices, shared in held:
                table[indices.start : indices.stop] = shared
            group.sequences[0].page_tables.append(table)
        return True

    def history_arrived(self, group: SequenceGroup) -> None:
        """Record that the KV of a group before `SequenceGroup.receives` is complete."""
        self.prefixes.keep_received(group, group.receives)
        group.reused = group.receives
        self.set_computed(group, group.reused)

    def _share_prompt(
        self, first: SequenceState, others: Sequence[SequenceState], tokens: int
    ) -> None:
        """Share the prompt pages of the first choice with the others, as `admit` describes."""
        for sequence in others:
            for table, pool in zip(first.page_tables, self.pools, strict=True):
                own = table.copy()
                full = self.plan.full(tokens)
                pool.share([page for page in own[:full] if page != FREED])
                for index in range(full, len(own)):
                    if own[index] != FREED:
                        [own[index]] = pool.allocate(1)
                sequence.page_tables.append(own)

    def set_computed(self, group: SequenceGroup, tokens: int, vacated: range = range(0)) -> None:
        """Set `SequenceGroup.computed`, and release pages that the prompt needs no longer.

        Only this method changes ``computed``. It is called when the step that computes a chunk was
        launched, when KV has arrived, and when a prompt must be computed again.

        If the cache encodes no pages, those that have left a window are released. Otherwise they
        stay until the prompt is complete, because its later chunks attend to them.

        Args:
            tokens: number of prompt tokens whose KV is in the pages.
            vacated: indices of the pages to release because their tokens were evicted; empty unless
                ``tokens`` completes the prompt.
        """
        group.computed = tokens
        for sequence in group.sequences:
            if not group.left:
                sequence.evicted = sequence.evicts
            for at, table in enumerate(sequence.page_tables):
                self._release(at, table[vacated.start : vacated.stop])
                del table[vacated.start : vacated.stop]
            if not self.plan.encodes:
                self.release_left(sequence, tokens)

    def release_left(self, sequence: SequenceState, length: int) -> None:
        """Release the pages of a sequence that have left the windows of their groups.

        Call it only if the step that attended to ``length`` tokens will not be repeated. If the
        cache encodes pages, that step encodes those that leave the window. Choices without pages
        are ignored.

        Args:
            length: number of tokens of the sequence to which that step attends.
        """
        if not sequence.page_tables:
            return
        for at, group in self._windows:
            table = sequence.page_tables[at]
            first = end = group.first_recent(length, self.plan.page_size)
            while first > group.sink_pages and table[first - 1] != FREED:
                first -= 1
            if first < end:
                self._release(at, table[first:end])
                table[first:end] = [FREED] * (end - first)

    def release(self, sequences: Iterable[SequenceState]) -> None:
        """Release all pages of sequences. Their prompts must be computed again.

        ``page_tables`` is then another list, so that pages of the next admission are told from
        these, see `runtime.engine.plan_deltas`.
        """
        for sequence in sequences:
            sequence.evicted = 0
            for at, table in enumerate(sequence.page_tables):
                self._release(at, [page for page in table if page != FREED])
            sequence.page_tables = []

    def step_launched(self, chunks: Iterable[Chunk] = ()) -> None:
        """Record the launch of a step. Pages released later may still be in use by it.

        Args:
            chunks: prompt chunks of the step; `set_computed` must not have been called for them.
        """
        computed = list(map(self.prefixes.computed, chunks))
        self._in_flight.append(_InFlight([[] for _ in self.pools], computed))

    def is_computing(self, group: SequenceGroup, tokens: int) -> bool:
        """Return whether steps in flight compute some of the first ``tokens`` tokens of a group."""
        return any(
            pages.group is group and pages.first * self.plan.page_size < tokens
            for step in self._in_flight
            for pages in step.computed
        )

    def step_completed(self) -> None:
        """Record the completion of the oldest in-flight step and free its deferred pages."""
        step = self._in_flight.popleft()
        for pages in step.computed:
            self.prefixes.keep_computed(pages)
        for pool, released in zip(self.pools, step.released, strict=True):
            pool.release(released)

    def _release(self, at: int, pages: list[int]) -> None:
        """Release pages of a group now, or when the latest in-flight step completes."""
        if self._in_flight:
            self._in_flight[-1].released[at].extend(pages)
        else:
            self.pools[at].release(pages)
