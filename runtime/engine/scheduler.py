"""Scheduling of engine steps: queues, batch slots and pages, without a model.

A `SequenceGroup` waits until it is admitted. Admission allocates pages for all of its tokens. It is
then prefilled chunk by chunk, or receives its KV from another worker. Then each sequence runs in
the decode batch until it ends. Admission is first come, first served, apart from prompts that wait
for others with the same beginning (`runtime.engine.leaders`).

Every step decodes all running sequences. The rest of ``step_tokens`` is filled with prompt chunks
of at most ``chunk_tokens`` tokens, as `choose_chunks` describes.

A step is in flight from its launch until its tokens are read. The tokens that it samples count in
the lengths of its sequences. Pages released in the meantime become free only when the step has
completed, because it may still write to them. CUDA stream order does not protect these pages,
because KV from another worker is written outside of the stream.

If pages are encoded or prompt tokens evicted, output tokens attend to encoded pages or to the
tokens that are kept. A prompt attends to the KV of all of its tokens as it was computed. A
preempted sequence is therefore prefilled to the end of its prompt, and its output tokens are
decoded again as forced tokens (`SequenceState.forced`).
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import chain

from runtime.core.limits import Limits
from runtime.core.plan import StepPlan, choose_chunks
from runtime.core.request import Request
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.engine.leaders import Leaders
from runtime.engine.pages import SequencePages
from runtime.engine.waiting import WaitingQueue, by_arrival
from runtime.errors import InvalidRequest, NotCached, OutOfPages, QueueFull, RuntimeFault
from runtime.pages.eviction import evicted_tokens
from runtime.pages.plan import PageCount, PagePlan


class Scheduler:
    """Queues, batch slots and pages of one engine. The same calls give the same results.

    Args:
        plan, total: page plan and numbers of pages; see `SequencePages`.
        kv_eviction: fraction of the tokens of a prompt to evict.
        prefix_root: see `EngineOptions`.

    Attributes:
        pages: pages of all sequences.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        plan: PagePlan,
        total: PageCount,
        context_length: int,
        kv_eviction: float = 0.0,
        prefix_root: bytes | None = None,
    ) -> None:
        if limits.chunk_tokens % plan.page_size:
            raise ValueError(f"chunk_tokens must be a multiple of the page size, {plan.page_size}")
        self._limits = limits
        self._context_length = context_length
        self._kv_eviction = kv_eviction
        self.pages = SequencePages(plan, total, prefix_root)
        self._leaders = Leaders(self.pages, limits.step_tokens)
        # Numbers of sequences submitted and of prompt tokens admitted so far.
        self._arrivals = self._prompt_tokens = 0
        self._waiting = WaitingQueue(limits.max_waiting)
        self._prefilling: list[SequenceGroup] = []
        self._received: dict[str, SequenceGroup] = {}
        self._held: dict[str, SequenceGroup] = {}
        # Sequences in the decode batch, from oldest to youngest.
        self._running: list[SequenceState] = []
        # Number of unfinished choices of each request.
        self._unfinished: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    @property
    def num_running(self) -> int:
        """Number of batch slots in use, including those of reserved and prefilling sequences."""
        groups = (*self._prefilling, *self._received.values())
        return len(self._running) + sum(group.slots for group in groups)

    @property
    def num_waiting(self) -> int:
        """Number of requests and preempted sequences that wait for batch slots or pages."""
        return len(self._waiting)

    @property
    def queue_tokens(self) -> int:
        """Number of tokens of unfinished requests.

        For sequences in the queue or in the batch, all prompt and output tokens so far are counted.
        For a prompt that will be held, only the tokens that are not computed yet are counted.
        """
        queues = (self._waiting, self._prefilling, self._received.values())
        running = sum(sequence.known for sequence in self._running)
        return running + sum(group.queued for groups in queues for group in groups)

    @property
    def pending_prompt_tokens(self) -> int:
        """Number of prompt tokens to compute, without prompts whose KV another worker sends."""
        groups = (*self._waiting, *self._prefilling, *self._received.values())
        return sum(group.left for group in groups if group.purpose is not Purpose.RECEIVE)

    @property
    def continuing(self) -> list[SequenceState]:
        """Running sequences below their maximum length, counting tokens in flight."""
        return [s for s in self._running if len(s.tokens) + s.lookahead < s.limit]

    @property
    def must_preempt(self) -> bool:
        """Whether the next decode step needs more pages than are free."""
        if self.pages.suffice_for_step(len(self._running)):
            return False
        plan = self.pages.plan
        missing = PageCount.total(map(plan.missing, plan.lacking(self.continuing)))
        return not missing.fits(self.pages.free)

    @property
    def has_work(self) -> bool:
        """Whether a step without new commands would compute or admit anything."""
        return bool(self._running or self._prefilling) or (
            bool(self._waiting) and self._admissible(self._waiting[0])
        )

    def cached_tokens(self, request: Request, purpose: Purpose = Purpose.RECEIVE) -> int:
        """Return how many tokens of a request are in cached pages now.

        It may be called on any thread. The result is a hint, because pages may be evicted at any
        time.

        Args:
            purpose: decides which pages a prefix needs; by default, the rest will be received.
        """
        return self.pages.prefixes.cached_tokens(self._group(request, purpose, choices=1))

    def uncached_tokens(self, request: Request) -> int | None:
        """Return how many prompt tokens of a request would have to be computed now.

        Like `cached_tokens`, it may be called on any thread, and the result is a hint. If pages are
        encoded, a prompt can only follow pages that were computed here, because it attends to KV
        that is not sent.

        Returns:
            None if no page of the prompt is cached, or if the pools have too few pages to compute
            the request.
        """
        group = self._group(request, Purpose.GENERATE, choices=1)
        cached = self.pages.prefixes.cached_tokens(group)
        if not cached or not self.pages.need(group, request.choices).fits(self.pages.total):
            return None
        return len(group.tokens) - cached

    def submit(
        self,
        request: Request,
        purpose: Purpose,
        may_reuse: int | None = None,
        may_compute: int = 0,
        *,
        receives: int = 0,
        worth: int = 1,
    ) -> None:
        """Queue a request.

        Args:
            may_reuse, may_compute, receives, worth: see `SequenceGroup`.

        Raises:
            InvalidRequest: the request has more choices than there are batch slots.
            OutOfPages: the tokens need more pages than the pool has.
            ValueError: the request id already exists, or the request cannot receive KV up to
                ``receives``.
        """
        if request.id in self:
            raise ValueError(f"request {request.id} already exists")
        group = self._group(request, purpose)
        self._check_receives(group, receives)
        if request.sampling.prompt_logprobs is not None and purpose is not Purpose.RECEIVE:
            may_reuse = 0  # every position needs a hidden state
        group.may_reuse, group.may_compute = may_reuse, may_compute
        group.receives, group.worth = receives, worth
        if group.slots > self._limits.max_running:
            raise InvalidRequest(
                f"{request.choices} choices exceed the {self._limits.max_running} batch slots"
            )
        self.pages.check_fits(group)
        self._arrivals += group.slots
        self._waiting.submit(group)
        self._unfinished[request.id] = request.choices

    def arrived(self, request_id: str) -> SequenceGroup:
        """Remove and return a group whose KV has arrived.

        The caller must then call `run` or `finish` for each of its sequences. Raises ValueError if
        the request has no reservation.
        """
        if request_id not in self._received:
            raise ValueError(f"KV arrived for request {request_id}, which has no reservation")
        group = self._received.pop(request_id)
        self.pages.set_computed(group, len(group.tokens))
        self.pages.prefixes.keep_received(group, len(group.tokens))
        return group

    def history_arrived(self, request_id: str, *, complete: bool) -> None:
        """Start the prefill of a group after the transfer of history; see `HistoryArrived`."""
        group = self._received.pop(request_id, None)
        if group is None:
            return
        if complete:
            self.pages.history_arrived(group)
        self._prefilling.append(group)

    def pin(self, request: Request) -> SequenceGroup:
        """Hold cached pages; see `Pin`.

        Raises:
            NotCached: a page is not cached, or no page may be reused.
            ValueError: the request id already exists.
        """
        if request.id in self:
            raise ValueError(f"request {request.id} already exists")
        group = self._group(request, Purpose.HOLD)
        if not self.pages.pin(group):
            raise NotCached(f"the KV of {len(request.tokens) - 1} tokens is not cached")
        self._arrivals += group.slots
        self._held[request.id] = group
        self._unfinished[request.id] = group.slots
        return group

    def drop(self, request_id: str) -> None:
        """Remove a request in any state and release its pages. Idempotent."""
        if self._unfinished.pop(request_id, None) is None:
            return
        for group in [g for g in self._groups() if g.request.id == request_id]:
            self._remove(group)
            self.pages.release(group.sequences)
        for sequence in [s for s in self._running if s.request.id == request_id]:
            self._stop(sequence)
            self.pages.release([sequence])

    def discard(self, request_id: str) -> None:
        """Drop a request whose KV may be damaged; no other request will reuse its pages."""
        sequences = chain(self._running, *(group.sequences for group in self._groups()))
        for sequence in [s for s in sequences if s.request.id == request_id]:
            self.pages.prefixes.forget(sequence)
        self.drop(request_id)

    def cancel(self, request_id: str, choice: int) -> bool:
        """End one choice; see `CancelChoice`. Return whether it was the last unfinished one."""
        for sequence in self._running:
            if sequence.is_choice(request_id, choice):
                return self.finish(sequence)
        for group in self._groups():
            for sequence in group.sequences:
                if sequence.is_choice(request_id, choice):
                    if group.slots == 1 and group.purpose is Purpose.GENERATE:
                        self._remove(group)
                        return self.finish(sequence)
                    sequence.cancelled = True
        return False

    def plan(self) -> StepPlan:
        """Allocate pages for running sequences, admit waiting groups and choose prompt chunks.

        If `must_preempt` is true, the caller must read the in-flight step before it calls this.
        """
        decode = self.continuing
        refused = self._grow(decode)
        reserved = self._admit()
        for group in self._waiting.overflow():
            self.drop(group.request.id)
            fault = QueueFull(f"{self._limits.max_waiting} requests are already waiting")
            refused.append((group.request.id, fault))
        deferred = [g for g in self._waiting.take_fresh() if g.purpose is Purpose.RECEIVE]
        decode = [sequence for sequence in decode if sequence.running]
        chunks = choose_chunks(self._prefilling, len(decode), self._limits, self.pages.plan)
        prefilling = frozenset(group.arrival for group in self._prefilling)
        return StepPlan(chunks, decode, reserved, deferred, refused, prefilling)

    def run(self, sequence: SequenceState) -> None:
        """Add a sequence to the decode batch. Its pages hold the KV of all tokens but the last."""
        sequence.running = True
        insort(self._running, sequence, key=by_arrival)

    def step_launched(self, plan: StepPlan) -> list[SequenceState]:
        """Record the launch of a step: its chunks, and the tokens that it samples.

        Choices of completed prompts start to run, unless they are held. Return ``plan.sampled``.
        """
        self.pages.step_launched(plan.chunks)
        sampled = plan.sampled
        for sequence in sampled:
            sequence.lookahead += 1
        decoded = list(plan.decode)
        for chunk in plan.chunks:
            self.pages.set_computed(chunk.group, chunk.end, chunk.vacated)
            chunk.group.scored = max(chunk.group.scored, chunk.scored.stop)
            if chunk.completes:
                decoded += self._prefilled(chunk.group)
        for sequence in decoded:
            if sequence.forced:
                self.append_forced(sequence)
        return sampled

    def step_completed(self, sequences: Iterable[SequenceState]) -> None:
        """Record the completion of the oldest in-flight step; free its deferred pages."""
        self.pages.step_completed()
        for sequence in sequences:
            sequence.lookahead -= 1

    def append(self, sequence: SequenceState, token: int) -> None:
        """Append a token that was sampled for a sequence."""
        sequence.tokens.append(token)
        if self.pages.windows:
            self.pages.release_left(sequence, len(sequence.tokens) - sequence.evicted - 1)

    def append_forced(self, sequence: SequenceState) -> None:
        """Append the next forced token, in place of a sampled one."""
        self.append(sequence, sequence.forced.popleft())

    def finish(self, sequence: SequenceState) -> bool:
        """Release the pages of a choice that has ended, unless they are held.

        Return whether it was the last unfinished choice of its request.
        """
        request_id = sequence.request.id
        if sequence.running:
            self._stop(sequence)
        held = request_id in self._held
        if not held:
            self.pages.release([sequence])
        self._unfinished[request_id] -= 1
        if self._unfinished[request_id]:
            return False
        if not held:
            del self._unfinished[request_id]
        return True

    def expects_token(self, sequence: SequenceState) -> bool:
        """Return whether a sampled token is used: whether its sequence is running or held."""
        if sequence.running:
            return True
        group = self._held.get(sequence.request.id)
        return group is not None and sequence in group.sequences

    def _grow(self, sequences: Iterable[SequenceState]) -> list[tuple[str, RuntimeFault]]:
        """Allocate a page to each sequence whose next token needs one, the oldest sequence first.

        If no page is free, the youngest sequence is preempted: it releases its pages and waits to
        be computed again. A preempted sequence that needs more pages than the pool has is refused.
        """
        refused: list[tuple[str, RuntimeFault]] = []
        for sequence in self.pages.plan.lacking(sequences):
            if not sequence.running:  # it was preempted for an older one
                continue
            missing = self.pages.plan.missing(sequence)
            if self._preempt_for(missing, sequence, refused):
                self.pages.grow(sequence, missing)
        return refused

    def _preempt_for(
        self, pages: PageCount, requester: SequenceState, refused: list[tuple[str, RuntimeFault]]
    ) -> bool:
        """Preempt until ``pages`` are free. Return False if ``requester`` no longer runs."""
        while not pages.fits(self.pages.free):
            candidates = (g for g in self._prefilling if g.purpose is Purpose.GENERATE)
            prefill = max(candidates, key=by_arrival, default=None)
            youngest = max(self._running, key=by_arrival)
            if prefill is not None and prefill.arrival > youngest.arrival:
                self._prefilling.remove(prefill)
                self._requeue(prefill)
                continue
            self._stop(youngest)
            self._rewind([youngest])
            scored = len(youngest.tokens)
            group = SequenceGroup(Purpose.GENERATE, [youngest], position=0, scored=scored)
            try:
                self.pages.check_fits(group)
            except OutOfPages as fault:
                refused.append((youngest.request.id, fault))
                self.pages.release([youngest])
                self.drop(youngest.request.id)
            else:
                self._requeue(group)
            if not requester.running:
                return False
        return True

    def _requeue(self, group: SequenceGroup) -> None:
        """Return a preempted group to the waiting queue."""
        self.pages.release(group.sequences)
        self._rewind(group.sequences)
        group.reused = 0
        self.pages.set_computed(group, 0)
        self._waiting.requeue(group)

    def _rewind(self, sequences: Iterable[SequenceState]) -> None:
        """Move to `SequenceState.forced` the tokens that prefill will not compute."""
        for sequence in sequences:
            known, prompt = len(sequence.tokens), sequence.request.prompt_tokens
            sequence.rewind(self.pages.plan.prefilled(known, prompt, sequence.evicts))

    def _admit(self) -> list[SequenceGroup]:
        """Admit waiting groups in order. Return those to which another worker will send KV."""
        reserved, first = [], 0
        while first < len(self._waiting) and self._admissible(self._waiting[first]):
            if self._leaders.should_wait(self._waiting[first], self._prefilling):
                first += 1
                continue
            group = self._waiting.pop(first)
            if group.may_compute:
                self._choose_purpose(group)
            self.pages.admit(group)
            if group.purpose is not Purpose.RECEIVE and group.position is None:
                group.position = self._prompt_tokens
                self._prompt_tokens += group.left
            if group.purpose is Purpose.RECEIVE or group.lacks_history:
                self._received[group.request.id] = group
                reserved.append(group)
            else:
                self._prefilling.append(group)
        return reserved

    def _choose_purpose(self, group: SequenceGroup) -> None:
        """Compute a prompt here instead of receiving it if `SequenceGroup.may_compute` allows it.

        Receiving may need fewer pages than computing. If only these are free, it is received.
        """
        group.purpose = Purpose.GENERATE
        left = len(group.tokens) - self.pages.prefixes.cached_tokens(group)
        if left > group.may_compute or not self.pages.suffice_for(group):
            group.purpose = Purpose.RECEIVE
        group.may_compute = 0

    def _check_receives(self, group: SequenceGroup, end: int) -> None:
        plan = self.pages.plan
        last = plan.full(len(group.tokens) - 1) * plan.page_size
        is_prompt = group.purpose is Purpose.HOLD and not group.evicts and not plan.encodes
        if end and not (is_prompt and 0 < end <= last and end % plan.page_size == 0):
            raise ValueError(
                f"request {group.request.id} of {len(group.tokens)} tokens cannot receive KV of "
                f"its first {end} tokens"
            )

    def _admissible(self, group: SequenceGroup) -> bool:
        slots = self.num_running + group.slots
        return slots <= self._limits.max_running and self.pages.suffice_for(group)

    def _group(
        self, request: Request, purpose: Purpose, choices: int | None = None
    ) -> SequenceGroup:
        """Return the group of a request that arrives now.

        Args:
            choices: see `SequenceGroup.of`.
        """
        limit = request.limit(self._context_length)
        evicts = evicted_tokens(request.prompt_tokens, self._kv_eviction, self.pages.plan.page_size)
        group = SequenceGroup.of(
            request, purpose, self._arrivals, limit=limit, evicts=evicts, choices=choices
        )
        self._rewind(group.sequences)
        self.pages.prefixes.start(group)
        return group

    def _prefilled(self, group: SequenceGroup) -> list[SequenceState]:
        """Move a group whose prompt is complete to those that are held, or run its sequences.

        Return the sequences that run.
        """
        self._prefilling.remove(group)
        if group.purpose is Purpose.HOLD:
            self._held[group.request.id] = group
            return []
        for sequence in group.sequences:
            self.run(sequence)
        return group.sequences

    def _stop(self, sequence: SequenceState) -> None:
        """Remove a sequence from the batch, before its pages are released."""
        self.pages.prefixes.keep_decoded(sequence)
        sequence.running = False
        self._running.remove(sequence)

    def _remove(self, group: SequenceGroup) -> None:
        """Remove a group that is not running from its queue."""
        for groups in (self._waiting, self._prefilling):
            if group in groups:
                groups.remove(group)
        self._received.pop(group.request.id, None)
        self._held.pop(group.request.id, None)

    def _groups(self) -> Iterator[SequenceGroup]:
        return chain(self._waiting, self._prefilling, self._received.values(), self._held.values())
