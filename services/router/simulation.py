"""Discrete-event simulation of a fleet behind the real dispatcher, fleet and policy.

Only the workers and the time are simulated. A prefill worker computes one prompt at a time, at a
rate in tokens/s. A decode worker runs a continuous batch: each step produces one token of every
sequence and takes ``(STEP_S + RESIDENT_S * resident tokens) / speed`` seconds. All workers send
heartbeats with the same period, at different times. By default, the rates are assumed, not
measured, because the simulation only compares policies (`simulated_workers.Machine`). Transfer,
preemption and failures are not simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from services.common.placement import Outcome, Placement, PlaceRequest, Release, Role
from services.common.router_errors import ErrorCode
from services.router.admission import Admission, AdmissionLimits
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.errors import Refusal
from services.router.fleet import Fleet, FleetLimits
from services.router.queue import PendingPlacement, PlacementQueue
from services.router.simulated_workers import (
    ASSUMED,
    HEARTBEAT_S,
    MAX_RUNNING,
    PREFILL_TOKENS_PER_S,
    RESIDENT_S,
    STEP_S,
    DecodeWorker,
    Job,
    Machine,
    PrefillWorker,
    SimulatedWorker,
    heartbeat,
    registration,
)

MAX_PLACEMENTS = 1 << 22
WORKERS_QUEUE = FleetLimits(backlog=2.0, prompt_backlog_s=inf, max_placements=MAX_PLACEMENTS)
"""Limits with which requests wait on workers more than in the router, to compare policies."""
NEVER_SHED = AdmissionLimits(shed_after_s=inf)


@dataclass(frozen=True)
class Trace:
    """Token counts per request of a workload. Each tuple is (average, minimum, maximum)."""

    inputs: tuple[float, float, float]
    outputs: tuple[float, float, float]


@dataclass(frozen=True)
class Speeds:
    """Speed of each worker, by role."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]


DEFAULT_SPEEDS = Speeds(prefill=(1.0, 0.75), decode=(1.0, 0.9, 0.75))
"""The workers that all comparisons of policies use."""

FDC_TABLE_6 = {
    "imdb": Trace((315, 106, 821), (37, 16, 87)),
    "arxiv": Trace((6300, 1600, 14_100), (243, 29, 464)),
    "cocktail": Trace((49_700, 9400, 104_900), (159, 44, 246)),
    "humaneval": Trace((204, 75, 697), (139, 11, 552)),
    "pg19": Trace((277, 138, 419), (61_500, 24_300, 97_500)),
}


def draw_jobs(
    traces: Sequence[Trace],
    number: int,
    *,
    utilization: float,
    scale: float,
    seed: int,
    speeds: Speeds = DEFAULT_SPEEDS,
) -> list[Job]:
    """Return jobs with Poisson arrivals, at a rate of ``utilization`` times `capacity`.

    Each job belongs to a random trace. Its lengths have a beta distribution with the minimum,
    maximum and average of that trace, and are multiplied by ``scale``.
    """
    rng = Random(seed)
    now = 0.0
    rate = utilization * capacity(traces, scale, speeds)
    jobs = []
    for _ in range(number):
        now += rng.expovariate(rate)
        trace = rng.choice(traces)
        prompt, output = (_draw(rng, span, scale) for span in (trace.inputs, trace.outputs))
        jobs.append(Job(now, prompt, output, max_tokens=max(1, round(trace.outputs[2] * scale))))
    return jobs


def capacity(traces: Sequence[Trace], scale: float, speeds: Speeds = DEFAULT_SPEEDS) -> float:
    """Return the throughput in requests/s with all workers busy and all batches full."""
    prompts = [trace.inputs[0] * scale for trace in traces]
    outputs = [trace.outputs[0] * scale for trace in traces]
    prefill_s = sum(prompts) / len(traces) / PREFILL_TOKENS_PER_S
    # Mean over all steps: the prompt and, on average, half of the output are resident.
    resident = sum(o * (p + o / 2) for p, o in zip(prompts, outputs, strict=True)) / sum(outputs)
    step_s = STEP_S + RESIDENT_S * MAX_RUNNING * resident
    decode_s = sum(outputs) / len(traces) * step_s / MAX_RUNNING
    return min(sum(speeds.prefill) / prefill_s, sum(speeds.decode) / decode_s)


def alone_s(job: Job, speeds: Speeds = DEFAULT_SPEEDS) -> float:
    """Return the latency of a job that runs alone on the fastest workers, in seconds."""
    steps_s = job.output * (STEP_S + RESIDENT_S * (job.prompt + job.output / 2))
    prefill_s = job.prompt / (PREFILL_TOKENS_PER_S * max(speeds.prefill))
    return prefill_s + steps_s / max(speeds.decode)


def _draw(rng: Random, span: tuple[float, float, float], scale: float) -> int:
    average, minimum, maximum = span
    middle = (average - minimum) / (maximum - minimum)
    share = rng.betavariate(4 * middle, 4 * (1 - middle))
    return max(1, round(scale * (minimum + share * (maximum - minimum))))


class Simulation:
    """A run of ``jobs`` under one policy. Runs with the same seed are identical.

    Args:
        speeds: the workers.
        reports_pace: whether workers report their pace, so that the policy knows slow ones.
        machine: size and step times of the workers.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        policy: PolicyName,
        seed: int,
        *,
        fleet: FleetLimits = WORKERS_QUEUE,
        admission: AdmissionLimits = NEVER_SHED,
        speeds: Speeds = DEFAULT_SPEEDS,
        reports_pace: bool = True,
        machine: Machine = ASSUMED,
    ) -> None:
        self.now = 0.0
        self.router = Dispatcher(
            Fleet(fleet),
            PlacementQueue(len(jobs)),
            policy,
            Random(seed),
            output_reserve=256,
            max_wait_s=inf,
            admission=Admission(admission),
        )
        self._jobs = jobs
        self._left = len(jobs)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._pending: dict[PendingPlacement, Job] = {}
        self._reports_pace = reports_pace
        self._machine = machine
        self.prefill = {
            f"p{i}": PrefillWorker(self, s, machine) for i, s in enumerate(speeds.prefill)
        }
        self.decode = {f"d{i}": DecodeWorker(self, s, machine) for i, s in enumerate(speeds.decode)}

    def run(self) -> None:
        """Run until every job has finished or was refused, and set ``done`` of each."""
        workers: dict[str, SimulatedWorker] = {**self.prefill, **self.decode}
        for index, (name, worker) in enumerate(workers.items()):
            role = Role.PREFILL if name in self.prefill else Role.DECODE
            self.router.register(registration(name, role, self._machine), 0.0)
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
            request_id="r",
            prompt_tokens=job.prompt,
            max_tokens=job.max_tokens,
            tenant=job.tenant,
            wait_s=3600.0,
        )
        self._pending[self.router.submit(request, self.now, job.prefix)] = job

    def _dispatch(self) -> None:
        """Start the jobs that were placed during the last event; end those that were refused."""
        for call in [call for call in self._pending if call.answer is not None]:
            job = self._pending.pop(call)
            placement = call.answer
            if isinstance(placement, Refusal) and placement.code is ErrorCode.QUEUE_FULL:
                job.refused = True
                job.done = self.now
                self._left -= 1
                continue
            if not isinstance(placement, Placement) or placement.prefill is None:
                raise RuntimeError(f"the router did not place a job: {placement!r}")
            job.placement_id = placement.placement_id
            job.workers = (placement.prefill.worker_id, placement.decode.worker_id)
            decode = self.decode[placement.decode.worker_id]
            decode.accept(job)
            self.prefill[placement.prefill.worker_id].accept(job, decode)

    def _beat(self, name: str, worker: SimulatedWorker) -> None:
        self._report(name, worker)
        self.at(self.now + HEARTBEAT_S, partial(self._beat, name, worker))

    def _report(self, name: str, worker: SimulatedWorker) -> None:
        running, waiting, tokens = worker.load()
        rate = worker.prompt_tokens_per_s
        report = heartbeat(
            name,
            running,
            waiting,
            tokens,
            worker.admitted,
            prompt_tokens_per_s=rate,
            pace=worker.pace if self._reports_pace else None,
            pages=self._machine.pages,
        )
        worker.admitted = []
        self.router.heartbeat(report, self.now)
