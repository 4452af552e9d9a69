"""Discrete-event simulation of a fleet behind the real dispatcher, fleet and policy.

Only the workers and the time are simulated. A prefill worker computes one prompt at a time, at a
rate in tokens/s. A decode worker runs a continuous batch: each step produces one token of every
sequence and takes ``(STEP_S + RESIDENT_S * resident tokens) / speed`` seconds. All workers send
heartbeats with the same period, at different times. The rates are assumed, not measured, because
the simulation only compares policies. Transfer, preemption and failures are not simulated.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from services.common.placement import (
    Compatibility,
    Heartbeat,
    ModelInfo,
    Outcome,
    Placement,
    PlaceRequest,
    Registration,
    Release,
    Role,
    WorkerState,
)
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import PolicyName
from services.router.queue import PendingPlacement, PlacementQueue

PREFILL_SPEEDS = (1.0, 0.75)
DECODE_SPEEDS = (1.0, 0.9, 0.75)
PREFILL_TOKENS_S = 600.0  # tokens/s of a prefill worker with speed 1
STEP_S = 5e-3  # duration of a decode step without resident tokens, seconds
RESIDENT_S = 1e-6  # additional step time per resident token, seconds
MAX_RUNNING = 32  # maximum sequences in the batch of a decode worker
HEARTBEAT_S = 0.25
PAGE_SIZE = 16  # tokens
PAGES = 1 << 15  # per worker: enough that pages are never the limit
MAX_WAIT_S, EPOCH = 1e9, "1"


@dataclass(frozen=True)
class Trace:
    """Token counts per request of a workload. Each tuple is (average, minimum, maximum)."""

    inputs: tuple[float, float, float]
    outputs: tuple[float, float, float]


FDC_TABLE_6 = {
    "imdb": Trace((315, 106, 821), (37, 16, 87)),
    "arxiv": Trace((6300, 1600, 14_100), (243, 29, 464)),
    "cocktail": Trace((49_700, 9400, 104_900), (159, 44, 246)),
    "humaneval": Trace((204, 75, 697), (139, 11, 552)),
    "pg19": Trace((277, 138, 419), (61_500, 24_300, 97_500)),
}


@dataclass
class Job:
    """One request. Times are in seconds since the start of the simulation.

    Attributes:
        output: number of output tokens that the request produces; unknown to the router.
        max_tokens: maximum output tokens that the client allows; known to the router.
    """

    arrival: float
    prompt: int
    output: int
    max_tokens: int
    placement_id: str = ""
    done: float = inf


def draw_jobs(
    traces: Sequence[Trace], number: int, *, utilization: float, scale: float, seed: int
) -> list[Job]:
    """Return jobs with Poisson arrivals, at a rate of ``utilization`` times `capacity`.

    Each job belongs to a random trace. Its lengths have a beta distribution with the minimum,
    maximum and average of that trace, and are multiplied by ``scale``.
    """
    rng, now = Random(seed), 0.0
    rate = utilization * capacity(traces, scale)
    jobs = []
    for _ in range(number):
        now += rng.expovariate(rate)
        trace = rng.choice(traces)
        prompt, output = (_draw(rng, span, scale) for span in (trace.inputs, trace.outputs))
        jobs.append(Job(now, prompt, output, max_tokens=max(1, round(trace.outputs[2] * scale))))
    return jobs


def capacity(traces: Sequence[Trace], scale: float) -> float:
    """Return the throughput in requests/s with all workers busy and all batches full."""
    prompts = [trace.inputs[0] * scale for trace in traces]
    outputs = [trace.outputs[0] * scale for trace in traces]
    prefill_s = sum(prompts) / len(traces) / PREFILL_TOKENS_S
    # Mean over all steps: the prompt and, on average, half of the output are resident.
    resident = sum(o * (p + o / 2) for p, o in zip(prompts, outputs, strict=True)) / sum(outputs)
    step_s = STEP_S + RESIDENT_S * MAX_RUNNING * resident
    decode_s = sum(outputs) / len(traces) * step_s / MAX_RUNNING
    return min(sum(PREFILL_SPEEDS) / prefill_s, sum(DECODE_SPEEDS) / decode_s)


def alone_s(job: Job) -> float:
    """Return the latency of a job that runs alone on the fastest workers, in seconds."""
    steps_s = job.output * (STEP_S + RESIDENT_S * (job.prompt + job.output / 2))
    prefill_s = job.prompt / (PREFILL_TOKENS_S * max(PREFILL_SPEEDS))
    return prefill_s + steps_s / max(DECODE_SPEEDS)


def _draw(rng: Random, span: tuple[float, float, float], scale: float) -> int:
    average, minimum, maximum = span
    middle = (average - minimum) / (maximum - minimum)
    share = rng.betavariate(4 * middle, 4 * (1 - middle))
    return max(1, round(scale * (minimum + share * (maximum - minimum))))


class Simulation:
    """A run of ``jobs`` under one policy. Runs with the same seed are identical."""

    def __init__(self, jobs: Sequence[Job], policy: PolicyName, seed: int) -> None:
        ids = count(1)
        self.now = 0.0
        self.router = Dispatcher(
            Fleet(FleetLimits(max_placements=1 << 22)),
            PlacementQueue(len(jobs)),
            policy,
            Random(seed),
            output_reserve=256,
            max_wait_s=MAX_WAIT_S,
            new_id=lambda: str(next(ids)),
        )
        self._jobs = jobs
        self._left = len(jobs)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._pending: dict[PendingPlacement, Job] = {}
        self.prefill = {f"p{i}": _Prefill(self, s) for i, s in enumerate(PREFILL_SPEEDS)}
        self.decode = {f"d{i}": _Decode(self, s) for i, s in enumerate(DECODE_SPEEDS)}

    def run(self) -> None:
        """Run until every job has finished, and set ``done`` of each."""
        workers: dict[str, _Worker] = {**self.prefill, **self.decode}
        for index, (name, worker) in enumerate(workers.items()):
            role = Role.PREFILL if name in self.prefill else Role.DECODE
            self.router.register(registration(name, role), 0.0)
            self._report(name, worker)
            phase = HEARTBEAT_S * (index + 1) / len(workers)
            self.at(phase, partial(self._beat, name, worker))
        for job in self._jobs:
            self.at(job.arrival, partial(self._arrive, job))
        while self._left:
            self.now, _, event = heappop(self._events)
            event()
            self._dispatch()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heappush(self._events, (time, next(self._order), event))

    def finish(self, job: Job) -> None:
        job.done = self.now
        self._left -= 1
        end = Release(placement_id=job.placement_id, outcome=Outcome.OK)
        self.router.release(end, self.now)

    def _arrive(self, job: Job) -> None:
        request = PlaceRequest(
            request_id="r", prompt_tokens=job.prompt, max_tokens=job.max_tokens, wait_s=3600.0
        )
        self._pending[self.router.submit(request, self.now)] = job

    def _dispatch(self) -> None:
        """Start the jobs that were placed during the last event."""
        for call in [call for call in self._pending if call.answer is not None]:
            job, placement = self._pending.pop(call), call.answer
            if not isinstance(placement, Placement) or placement.prefill is None:
                raise RuntimeError(f"the router did not place a job: {placement!r}")
            job.placement_id = placement.placement_id
            decode = self.decode[placement.decode.worker_id]
            decode.accept(job)
            self.prefill[placement.prefill.worker_id].accept(job, decode)

    def _beat(self, name: str, worker: "_Worker") -> None:
        self._report(name, worker)
        self.at(self.now + HEARTBEAT_S, partial(self._beat, name, worker))

    def _report(self, name: str, worker: "_Worker") -> None:
        running, waiting, tokens = worker.load()
        report = heartbeat(name, running, waiting, tokens, worker.admitted)
        worker.admitted = []
        self.router.heartbeat(report, self.now)


class _Worker:
    def __init__(self, simulation: Simulation, speed: float) -> None:
        self._simulation = simulation
        self._speed = speed
        self.admitted: list[str] = []

    def load(self) -> tuple[int, int, int]:
        """Return the numbers of running sequences, waiting sequences and queued tokens."""
        raise NotImplementedError


class _Prefill(_Worker):
    """A prefill worker: one prompt at a time, in order of arrival."""

    def __init__(self, simulation: Simulation, speed: float) -> None:
        super().__init__(simulation, speed * PREFILL_TOKENS_S)
        self._queue: deque[tuple[Job, _Decode]] = deque()
        self._ends = 0.0

    def accept(self, job: Job, decode: "_Decode") -> None:
        self.admitted.append(job.placement_id)
        self._queue.append((job, decode))
        if len(self._queue) == 1:
            self._start()

    def load(self) -> tuple[int, int, int]:
        if not self._queue:
            return 0, 0, 0
        waiting = sum(job.prompt for job, _ in self._queue) - self._queue[0][0].prompt
        left = round((self._ends - self._simulation.now) * self._speed)
        return 1, len(self._queue) - 1, waiting + max(0, left)

    def _start(self) -> None:
        self._ends = self._simulation.now + self._queue[0][0].prompt / self._speed
        self._simulation.at(self._ends, self._finish)

    def _finish(self) -> None:
        job, decode = self._queue.popleft()
        decode.arrive(job)
        if self._queue:
            self._start()


class _Decode(_Worker):
    """A decode worker. Sequences advance together; ``_clock`` is the number of decode steps."""

    def __init__(self, simulation: Simulation, speed: float) -> None:
        super().__init__(simulation, speed)
        self._incoming: set[str] = set()
        self._incoming_tokens = 0
        self._waiting: deque[Job] = deque()
        self._batch: list[tuple[float, int, Job]] = []  # heap, ordered by each job's last step
        self._entries = count()
        self._resident = 0.0
        self._clock = 0.0
        self._updated = 0.0
        self._plan = 0

    def accept(self, job: Job) -> None:
        self.admitted.append(job.placement_id)
        self._incoming.add(job.placement_id)
        self._incoming_tokens += job.prompt

    def arrive(self, job: Job) -> None:
        """Add a job, after its KV has arrived, to the batch or to the queue for the batch."""
        self._advance()
        self._incoming.remove(job.placement_id)
        self._incoming_tokens -= job.prompt
        self._resident += job.prompt
        self._waiting.append(job)
        self._refill()

    def load(self) -> tuple[int, int, int]:
        self._advance()
        self._refill()
        waiting = len(self._incoming) + len(self._waiting)
        return len(self._batch), waiting, self._incoming_tokens + round(self._resident)

    def _step_s(self) -> float:
        return (STEP_S + RESIDENT_S * self._resident) / self._speed

    def _advance(self) -> None:
        now = self._simulation.now
        if self._batch:
            steps = (now - self._updated) / self._step_s()
            self._clock += steps
            self._resident += steps * len(self._batch)
        self._updated = now

    def _refill(self) -> None:
        """Fill the batch and schedule the next end of a job at the current step time."""
        while self._waiting and len(self._batch) < MAX_RUNNING:
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
    name: str, running: int, waiting: int, queue_tokens: int, admitted: list[str]
) -> Heartbeat:
    """Return the heartbeat of a simulated worker."""
    return Heartbeat(
        worker_id=name,
        epoch=EPOCH,
        state=WorkerState.READY,
        queue_tokens=queue_tokens,
        pages_free=max(0, PAGES - -(-queue_tokens // PAGE_SIZE)),
        running=running,
        waiting=waiting,
        admitted=admitted,
    )


def registration(name: str, role: Role) -> Registration:
    """Return the registration of a simulated worker."""
    return Registration(
        worker_id=name,
        epoch=EPOCH,
        role=role,
        address="simulated:1",
        model=ModelInfo(name="m", context_length=1 << 20, vocab_size=1, model_hash=""),
        compatibility=Compatibility(
            model_hash="",
            kv_format="dense",
            kv_format_hash="",
            kv_format_version=1,
            page_size=PAGE_SIZE,
            codec_version=1,
            codec="raw",
            codebook_id="",
            kernel_plan_hash="",
        ),
        page_size=PAGE_SIZE,
        pages_total=PAGES,
        max_running=MAX_RUNNING,
    )
