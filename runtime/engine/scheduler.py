"""Decides what the next step computes: queues, batch slots and pages, without a model.

A `SequenceGroup` waits, is admitted with all the pages of its tokens, is prefilled chunk by chunk
(or receives its KV from another worker), and then each of its sequences runs in the decode batch
until it ends. Chunks of a sequence end at multiples of ``chunk_tokens`` whatever else is computed,
and admission is first come, first served.

A decode step may be in flight: launched, its tokens not known yet. It counts in the lengths of its
sequences, and pages that anybody lets go are not free before it has landed: until then it, and what
was launched before it, may write into them, and KV from another worker does not wait for that.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from runtime.core.limits import Limits
from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import Request
from runtime.core.sequence import Purpose, Sequence, SequenceGroup
from runtime.errors import InvalidRequest, OutOfPages, QueueFull, RuntimeFault
from runtime.kv.pages import PagePool, pages_for


class Scheduler:
    """The queues of one engine. Deterministic: nothing but the order of calls decides."""

    def __init__(
        self, limits: Limits, *, num_pages: int, page_size: int, context_length: int
    ) -> None:
        if limits.chunk_tokens % page_size:
            raise ValueError(f"chunk_tokens must be a multiple of the page size, {page_size}")
        self._limits = limits
        self._page_size = page_size
        self._context_length = context_length
        self.pool = PagePool(num_pages)
        self._arrivals = 0
        self._waiting: list[SequenceGroup] = []  # by age
        self._fresh: list[SequenceGroup] = []  # submitted since the last plan
        self._prefilling: list[SequenceGroup] = []
        self._received: dict[str, SequenceGroup] = {}
        self._held: dict[str, SequenceGroup] = {}
        self._running: list[Sequence] = []  # by age
        self._flights: deque[list[int]] = (
            deque()
        )  # of each step, pages let go since it was launched
        self._unfinished: dict[str, int] = {}  # choices, of every request that is known

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    @property
    def num_running(self) -> int:
        """Sequences that have a batch slot."""
        return (
            len(self._running)
            + sum(group.slots for group in self._prefilling)
            + sum(group.slots for group in self._received.values())
        )

    @property
    def num_waiting(self) -> int:
        """Sequence groups without a batch slot."""
        return len(self._waiting)

    @property
    def queue_tokens(self) -> int:
        """Tokens accepted and not yet finished: of prompts that are held for others those not yet
        computed, of all else those that are, or will be, resident."""
        tokens = sum(len(sequence.tokens) for sequence in self._running)
        for group in (*self._waiting, *self._prefilling, *self._received.values()):
            if group.purpose is Purpose.HOLD:
                tokens += len(group.tokens) - group.computed
            else:
                tokens += len(group.tokens) * len(group.sequences)
        return tokens

    @property
    def continuing(self) -> list[Sequence]:
        """What runs and goes on after the tokens that are being drawn, as far as one can know."""
        return [s for s in self._running if len(s.tokens) + s.ahead < s.limit]

    @property
    def starved(self) -> bool:
        """Whether somebody would have to go for the others to get the slots of the next step."""
        free = self.pool.free
        if free >= len(self._running):  # none needs more than one
            return False
        return sum(self._missing(sequence) for sequence in self.continuing) > free

    @property
    def has_work(self) -> bool:
        """Whether a step without new commands would do anything."""
        return bool(self._running or self._prefilling) or (
            bool(self._waiting) and self._admissible(self._waiting[0])
        )

    def submit(self, request: Request, purpose: Purpose) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it has more choices than there are batch slots.
            OutOfPages: its tokens would not fit an empty pool.
        """
        if request.id in self:
            raise ValueError(f"request {request.id} is known already")
        limit = min(request.prompt_tokens + request.max_tokens, self._context_length)
        sequences = [
            Sequence(request, choice, self._arrivals, list(request.tokens), limit)
            for choice in range(request.choices)
        ]
        group = SequenceGroup(purpose, sequences)
        if group.slots > self._limits.max_running:
            raise InvalidRequest(
                f"{request.choices} choices, where {self._limits.max_running} may run"
            )
        self._check_fits_ever(group)
        self._arrivals += 1
        self._waiting.append(group)
        self._fresh.append(group)
        self._unfinished[request.id] = request.choices

    def arrived(self, request_id: str) -> SequenceGroup:
        """Take a group whose KV has arrived; its sequences are then for `run` or `retire`.

        Raises ValueError if the request was not reserved.
        """
        if request_id not in self._received:
            raise ValueError(f"KV arrived for {request_id}, which has no reservation")
        group = self._received.pop(request_id)
        group.computed = len(group.tokens)
        return group

    def drop(self, request_id: str) -> None:
        """Forget a request and free its pages, whatever it is doing. Idempotent."""
        if self._unfinished.pop(request_id, None) is None:
            return
        for group in self._groups():
            if group.request.id == request_id:
                self._release(group.sequences)
        for sequence in [s for s in self._running if s.request.id == request_id]:
            self._stop(sequence)
            self._release([sequence])
        self._waiting = [w for w in self._waiting if w.request.id != request_id]
        self._prefilling = [w for w in self._prefilling if w.request.id != request_id]
        self._received.pop(request_id, None)
        self._held.pop(request_id, None)

    def plan(self) -> StepPlan:
        """Grow what runs, admit what fits, and choose this step's chunks.

        If it is `starved`, no step may be in flight.
        """
        decode = self.continuing
        refused = self._grow(decode)
        reserved = self._admit()
        refused += self._refuse_overflow()
        decode = [sequence for sequence in decode if sequence.running]
        return StepPlan(self._choose_chunks(), decode, reserved, refused)

    def computed(self, chunk: Chunk) -> None:
        """A chunk is in the pages; the last one takes its group out of the prefill queue."""
        group = chunk.group
        group.computed += chunk.count
        if chunk.completes:
            self._prefilling.remove(group)
            if group.purpose is Purpose.HOLD:
                self._held[group.request.id] = group

    def run(self, sequence: Sequence) -> None:
        """A sequence whose tokens but the last are in its pages joins the decode batch."""
        sequence.running = True
        insort(self._running, sequence, key=_age)

    def launched(self, sequences: Iterable[Sequence]) -> None:
        """A step is in flight that draws one more token for each of these."""
        self._flights.append([])
        for sequence in sequences:
            sequence.ahead += 1

    def landed(self, sequences: Iterable[Sequence]) -> None:
        """The first of the steps in flight has ended, and needs no page any more."""
        self.pool.release(self._flights.popleft())
        for sequence in sequences:
            sequence.ahead -= 1

    def finish(self, sequence: Sequence) -> bool:
        """One choice has ended; True if it was its request's last one.

        Its pages are returned unless they are held.
        """
        request_id = sequence.request.id
        if sequence.running:
            self._stop(sequence)
        held = request_id in self._held
        if not held:
            self._release([sequence])
        self._unfinished[request_id] -= 1
        if self._unfinished[request_id]:
            return False
        if not held:
            del self._unfinished[request_id]
        return True

    def discard(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that was in no queue when its request was dropped."""
        self._release([sequence])

    def _grow(self, sequences: Iterable[Sequence]) -> list[tuple[str, RuntimeFault]]:
        """Give running sequences the slot of their last token, the oldest first.

        Where no page is free the youngest sequence loses its own and waits to be computed again;
        one that finds no page although nobody else holds any is refused.
        """
        refused: list[tuple[str, RuntimeFault]] = []
        for sequence in sequences:
            if not sequence.running:  # it was preempted for an older one
                continue
            missing = self._missing(sequence)
            if missing and self._make_room(missing, sequence, refused):
                sequence.pages += self.pool.allocate(missing)
        return refused

    def _make_room(
        self, pages: int, wanting: Sequence, refused: list[tuple[str, RuntimeFault]]
    ) -> bool:
        """Preempt until ``pages`` are free. False if ``wanting`` itself had to go."""
        while self.pool.free < pages:
            prefill = max(
                (g for g in self._prefilling if g.purpose is Purpose.GENERATE),
                key=_age,
                default=None,
            )
            youngest = max(self._running, key=_age)
            if prefill is not None and prefill.age > youngest.age:
                self._prefilling.remove(prefill)
                self._requeue(prefill)
                continue
            self._stop(youngest)
            group = SequenceGroup(Purpose.GENERATE, [youngest])
            try:
                self._check_fits_ever(group)
            except OutOfPages as fault:
                refused.append((youngest.request.id, fault))
                self._release([youngest])
                self.drop(youngest.request.id)
            else:
                self._requeue(group)
            if youngest is wanting:
                return False
        return True

    def _requeue(self, group: SequenceGroup) -> None:
        self._release(group.sequences)
        group.computed = 0
        insort(self._waiting, group, key=_age)

    def _admit(self) -> list[SequenceGroup]:
        """Seat what waits, in order, with all its pages. Returns what was reserved."""
        reserved = []
        while self._waiting and self._admissible(self._waiting[0]):
            group = self._waiting.pop(0)
            self._give_pages(group)
            if group.purpose is Purpose.RECEIVE:
                self._received[group.request.id] = group
                reserved.append(group)
            else:
                self._prefilling.append(group)
        return reserved

    def _give_pages(self, group: SequenceGroup) -> None:
        """Pages for the tokens: full ones are shared by all choices, the last is each one's own."""
        first, *others = group.sequences
        tokens = len(group.tokens)
        first.pages = self.pool.allocate(pages_for(tokens, self._page_size))
        if group.purpose is Purpose.HOLD:
            return
        full = first.pages[: tokens // self._page_size]
        for sequence in others:
            self.pool.share(full)
            sequence.pages = full + self.pool.allocate(len(first.pages) - len(full))

    def _refuse_overflow(self) -> list[tuple[str, RuntimeFault]]:
        """Of what came since the last plan, refuse the latest that exceeds the queue's bound."""
        refused: list[tuple[str, RuntimeFault]] = []
        for group in reversed(self._fresh):
            if len(self._waiting) <= self._limits.max_waiting:
                break
            if group in self._waiting:
                self.drop(group.request.id)
                fault = QueueFull(f"{self._limits.max_waiting} requests wait already")
                refused.append((group.request.id, fault))
        self._fresh.clear()
        return refused

    def _choose_chunks(self) -> list[Chunk]:
        """The next chunk of each piece of group, in order, as far as the step's budget goes."""
        chunks, budget = [], self._limits.step_tokens
        for group in self._prefilling:
            count = min(self._limits.chunk_tokens, len(group.tokens) - group.computed)
            if count > budget:
                break
            chunks.append(Chunk(group, group.computed, count))
            budget -= count
        return chunks

    def _admissible(self, group: SequenceGroup) -> bool:
        slots = self.num_running + group.slots
        return slots <= self._limits.max_running and self._need(group) <= self.pool.free

    def _check_fits_ever(self, group: SequenceGroup) -> None:
        need = self._need(group)
        if need > self.pool.total:
            raise OutOfPages(
                f"{len(group.tokens)} tokens need {need} pages, of {self.pool.total} in all"
            )

    def _need(self, group: SequenceGroup) -> int:
        """Pages that must be free to start: of the tokens, and of each sequence's next one."""
        tokens = len(group.tokens)
        if group.purpose is Purpose.HOLD:
            return pages_for(tokens, self._page_size)
        shared = tokens // self._page_size
        longest = group.sequences[0].limit - 1
        own = pages_for(min(tokens + 1, longest), self._page_size) - shared
        return shared + own * len(group.sequences)

    def _missing(self, sequence: Sequence) -> int:
        """Pages of the slots of its tokens that it does not have yet."""
        return pages_for(sequence.length, self._page_size) - len(sequence.pages)

    def _stop(self, sequence: Sequence) -> None:
        sequence.running = False
        self._running.remove(sequence)

    def _groups(self) -> Iterator[SequenceGroup]:
        yield from self._waiting
        yield from self._prefilling
        yield from self._received.values()
        yield from self._held.values()

    def _release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if self._flights:
                self._flights[-1] += sequence.pages
            else:
                self.pool.release(sequence.pages)
            sequence.pages = []


def _age(item: SequenceGroup | Sequence) -> tuple[int, int]:
    return item.age
