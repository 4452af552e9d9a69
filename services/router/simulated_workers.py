"""Simulated prefill and decode workers; see `services.router.simulation`."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

from runtime.pages.plan import PAGE_SIZE, PageCount, PagePlan
from services.common.pace import MeasuredStep, PaceMeter
from services.common.placement import (
    PROTOCOL,
    Compatibility,
    Heartbeat,
    ModelInfo,
    Registration,
    Role,
    StepPace,
    WorkerState,
)
from services.router.simulated_cache import Pages, SimulatedCache

PREFILL_TOKENS_PER_S = 600.0
"""Prompt tokens per second of a prefill worker with speed 1."""
STEP_S = 5e-3
"""Duration of a decode step without resident tokens, seconds."""
RESIDENT_S = 1e-6
"""Additional duration of a decode step for each resident token, seconds."""
MAX_RUNNING = 32
"""Maximum number of sequences in the batch of a decode worker."""
PAGE_PLAN = PagePlan(PAGE_SIZE)
PAGES = 1 << 15


@dataclass(frozen=True, slots=True)
class Machine:
    """Size of the simulated workers, and the durations of their steps at speed 1, in seconds.

    Attributes:
        token_s: time to compute a prompt token.
        square_s: additional time for each token, times the tokens that it attends to, times two.
        least_s: minimum time to compute a prompt.
        latency_s: time from the end of a prompt to its first token, in which the worker computes
            other prompts.
        step_s: time of a decode step without resident tokens.
        resident_s: additional time of a decode step for each resident token.
        pages: number of pages of a worker. By default, pages are never the limit.
        caches: whether workers have a prefix cache, of as many pages.
    """

    token_s: float = 1 / PREFILL_TOKENS_PER_S
    square_s: float = 0.0
    least_s: float = 0.0
    latency_s: float = 0.0
    step_s: float = STEP_S
    resident_s: float = RESIDENT_S
    max_running: int = MAX_RUNNING
    pages: int = PAGES
    caches: bool = False

    def prompt_s(self, tokens: int, cached: int = 0) -> float:
        """Return the time to compute ``tokens`` prompt tokens after ``cached`` ones, seconds."""
        squares = (cached + tokens) ** 2 - cached**2
        return max(self.least_s, tokens * self.token_s + squares * self.square_s)


ASSUMED = Machine()
"""Workers whose times are assumed, not measured, to compare policies."""
HEARTBEAT_S = 0.25
EPOCH = "1"


@dataclass
class Job:
    """One request. Times are in seconds since the start of the simulation.

    Attributes:
        output: number of output tokens that the request produces; unknown to the router.
        max_tokens: maximum output tokens that the client allows; known to the router.
        pages: pages of the prompt, for the prefix caches of the workers; empty: nothing is cached.
        prefix: hashes that the router gets.
        cached: prompt tokens that the prefill and the decode worker had cached.
        first: time of the first token.
        workers: names of the prefill and the decode worker, once it is placed.
        refused: whether the router refused the job.
    """

    arrival: float
    prompt: int
    output: int
    max_tokens: int
    tenant: str | None = None
    pages: Pages = ()
    prefix: tuple[bytes, ...] = ()
    cached: tuple[int, int] = (0, 0)
    first: float = inf
    placement_id: str = ""
    workers: tuple[str, str] | None = None
    refused: bool = False
    done: float = inf


class Events(Protocol):
    """The simulated clock and its scheduled events; times are in seconds."""

    now: float

    def at(self, time: float, event: Callable[[], None]) -> None: ...

    def finish(self, job: Job) -> None: ...


class SimulatedWorker:
    """A worker whose steps take ``1 / speed`` times as long as those of one with speed 1.

    Attributes:
        speed: speed of prompts and steps that begin from now on.
    """

    def __init__(self, simulation: Events, speed: float, machine: Machine = ASSUMED) -> None:
        self._simulation = simulation
        self.speed = speed
        self._machine = machine
        self._cache = SimulatedCache(machine.pages if machine.caches else 0)
        self._meter = PaceMeter()
        self._busy_until = 0.0
        self.admitted: list[str] = []

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens that the worker computes per second; 0 if it computes none."""
        return 0.0

    @property
    def pace(self) -> StepPace | None:
        """Pace that the worker reports."""
        idle_s = max(0.0, self._simulation.now - self._busy_until)
        return self._meter.pace(idle_s=idle_s, current=self._current())

    def _current(self) -> MeasuredStep | None:
        """Return the step in progress, with its duration so far; None if steps are short."""
        return None

    def _cached(self, job: Job) -> int:
        """Return the prompt tokens of a job that are cached; at least one must be computed."""
        return min(self._cache.match(job.pages) * PAGE_SIZE, job.prompt - 1)

    def load(self) -> tuple[int, int, int]:
        """Return the numbers of running sequences, waiting sequences and queued tokens."""
        raise NotImplementedError


class PrefillWorker(SimulatedWorker):
    """A prefill worker: one prompt at a time, in order of arrival."""

    def __init__(self, simulation: Events, speed: float, machine: Machine = ASSUMED) -> None:
        super().__init__(simulation, speed, machine)
        # Each job with its decode worker, and its tokens to compute when it was accepted.
        self._queue: deque[tuple[Job, DecodeWorker, int]] = deque()
        self._queued = 0
        self._step = MeasuredStep(0.0, 0, 0, decoded=0)
        self._ends = 0.0

    def accept(self, job: Job, decode: "DecodeWorker") -> None:
        self.admitted.append(job.placement_id)
        tokens = job.prompt - self._cached(job)
        self._queue.append((job, decode, tokens))
        self._queued += tokens
        if len(self._queue) == 1:
            self._start()

    def load(self) -> tuple[int, int, int]:
        if not self._queue:
            return 0, 0, 0
        left = round((self._ends - self._simulation.now) * self.prompt_tokens_per_s)
        return 1, len(self._queue) - 1, self._queued + max(0, left)

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.speed / self._machine.token_s

    def _current(self) -> MeasuredStep | None:
        if not self._queue:
            return None
        left_s = self._ends - self._simulation.now
        return replace(self._step, seconds=self._step.seconds - left_s)

    def _start(self) -> None:
        job, _, counted = self._queue[0]
        self._queued -= counted
        cached = self._cached(job)
        job.cached = cached, job.cached[1]
        tokens = job.prompt - cached
        duration_s = self._machine.prompt_s(tokens, cached) / self.speed
        self._step = MeasuredStep(duration_s, tokens, tokens * (1 + cached), decoded=0)
        self._ends = self._busy_until = self._simulation.now + duration_s
        self._simulation.at(self._ends, self._finish)

    def _finish(self) -> None:
        job, decode, _ = self._queue.popleft()
        self._meter.add(self._step, self._simulation.now)
        self._cache.insert(job.pages)
        job.first = self._simulation.now + self._machine.latency_s
        decode.arrive(job)
        if self._queue:
            self._start()


class DecodeWorker(SimulatedWorker):
    """A decode worker. Sequences advance together; ``_clock`` is the number of decode steps."""

    def __init__(self, simulation: Events, speed: float, machine: Machine = ASSUMED) -> None:
        super().__init__(simulation, speed, machine)
        self._incoming: set[str] = set()
        self._incoming_tokens = 0
        self._waiting: deque[Job] = deque()
        # Heap of the jobs in the batch, in the order of their last steps.
        self._batch: list[tuple[float, int, Job]] = []
        self._entries = count()
        self._resident = 0.0
        self._clock = 0.0
        self._updated = 0.0
        self._plan = 0

    def accept(self, job: Job) -> None:
        self.admitted.append(job.placement_id)
        self._incoming.add(job.placement_id)
        self._incoming_tokens += job.prompt
        job.cached = job.cached[0], self._cached(job)

    def arrive(self, job: Job) -> None:
        """Add a job, after its KV has arrived, to the batch or to the queue for the batch."""
        self._advance()
        self._incoming.remove(job.placement_id)
        self._incoming_tokens -= job.prompt
        self._resident += job.prompt
        self._cache.insert(job.pages)
        self._waiting.append(job)
        self._refill()

    def load(self) -> tuple[int, int, int]:
        self._advance()
        self._refill()
        waiting = len(self._incoming) + len(self._waiting)
        return len(self._batch), waiting, self._incoming_tokens + round(self._resident)

    def _step_s(self) -> float:
        return (self._machine.step_s + self._machine.resident_s * self._resident) / self.speed

    def _advance(self) -> None:
        now = self._simulation.now
        if self._batch:
            step_s = self._step_s()
            steps = (now - self._updated) / step_s
            self._busy_until = now
            if steps >= 1:
                batch = len(self._batch)
                self._meter.add(MeasuredStep(step_s, batch, round(self._resident), batch), now)
            self._clock += steps
            self._resident += steps * len(self._batch)
        self._updated = now

    def _refill(self) -> None:
        """Fill the batch and schedule the next end of a job at the current step time."""
        while self._waiting and len(self._batch) < self._machine.max_running:
            job = self._waiting.popleft()
            heappush(self._batch, (self._clock + job.output, next(self._entries), job))
        self._plan += 1
        if self._batch:
            left_s = max(0.0, self._batch[0][0] - self._clock) * self._step_s()
            self._simulation.at(self._simulation.now + left_s, partial(self._end, self._plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        _, _, job = heappop(self._batch)
        self._resident -= job.prompt + job.output
        self._simulation.finish(job)
        self._refill()


def heartbeat(
    name: str,
    running: int,
    waiting: int,
    queue_tokens: int,
    admitted: list[str],
    *,
    prompt_tokens_per_s: float = 0.0,
    pace: StepPace | None = None,
    pages: int = PAGES,
) -> Heartbeat:
    """Return the heartbeat of a simulated worker.

    If ``prompt_tokens_per_s`` is not 0, the queued tokens are prompt tokens to compute.
    """
    return Heartbeat(
        worker_id=name,
        epoch=EPOCH,
        state=WorkerState.READY,
        queue_tokens=queue_tokens,
        pending_prompt_tokens=queue_tokens if prompt_tokens_per_s else 0,
        prompt_tokens_per_s=prompt_tokens_per_s,
        pace=pace,
        pages_free=PAGE_PLAN.by_name(PageCount(max(0, pages - PAGE_PLAN.pages(queue_tokens)))),
        running=running,
        waiting=waiting,
        admitted=admitted,
    )


def registration(name: str, role: Role, machine: Machine = ASSUMED) -> Registration:
    """Return the registration of a simulated worker."""
    return Registration(
        protocol=PROTOCOL,
        worker_id=name,
        epoch=EPOCH,
        role=role,
        address="simulated:1",
        model=ModelInfo(
            name="m", context_length=1 << 20, vocab_size=1, max_logprobs=0, model_hash=""
        ),
        compatibility=Compatibility(
            model_hash="",
            context_length=1 << 20,
            kv_format="dense",
            kv_format_hash="",
            kv_format_version=1,
            page_plan=PAGE_PLAN,
            codec_version=1,
            frame_version=1,
            codec="raw",
            codebook_id="",
            kernel_plan_hash="",
            chunk_tokens=512,
        ),
        pages_total=PAGE_PLAN.by_name(PageCount(machine.pages)),
        page_bytes={group.name: 2 << 20 for group in PAGE_PLAN.groups},
        max_running=machine.max_running,
        max_waiting=256,
        heartbeat_s=HEARTBEAT_S,
        reuses_prefixes=True,
    )
