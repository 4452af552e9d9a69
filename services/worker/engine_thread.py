"""The engine thread, the only thread that uses the engine, its pages and its device."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
import torch

from runtime.core.plan import StepSize
from runtime.core.request import Request
from runtime.core.sequence import Purpose
from runtime.engine import Command, Engine, StepOutput
from runtime.engine.prefixes import PrefixCounts
from runtime.pages.plan import PageCount, PagePlan
from services.common.pace import MeasuredStep, PaceMeter
from services.common.placement import StepPace
from services.common.rate import Rate
from services.worker.stall import Stall

T = TypeVar("T")

log = structlog.get_logger()

MAX_TIMES = 1 << 16
"""Durations of each kind that are kept until they are taken; older ones are dropped."""
_RATE_MEMORY_S = 5.0
"""Time constant of the rate of computed prompt tokens, over steps with prompts and idle time, in
seconds."""
_RATE_KNOWN_AFTER_S = 0.01
"""Duration of such steps after which the rate is known, in seconds."""
STOP_S = 10.0
"""Maximum time to wait for the last step and job at shutdown, in seconds."""

_NOTHING = StepOutput()


@dataclass(frozen=True)
class EngineLoad:
    """Load of a worker after its last step.

    Attributes:
        commands: number of commands taken since the start, in the order of their submission.
        queue_tokens: tokens accepted and not yet finished.
        pending_prompt_tokens: accepted prompt tokens that are not computed yet.
        prompt_tokens_per_s: prompt tokens computed per second in recent steps with prompts; 0 if
            there were none.
        pages_free: free KV pages.
        running: sequences in the batch.
        waiting: sequences that wait for pages or a place in the batch.
        steps: steps since the start.
        busy_s: total time of these steps in seconds, without idle time.
        prefixes: use of cached pages since the start.
    """

    commands: int
    queue_tokens: int
    pending_prompt_tokens: int
    prompt_tokens_per_s: float
    pages_free: PageCount
    running: int
    waiting: int
    steps: int
    busy_s: float
    prefixes: PrefixCounts = field(default_factory=PrefixCounts)


@dataclass(frozen=True)
class _Job:
    call: Callable[[Engine], None]


class EngineThread:
    """Runs the engine's steps, and other jobs between them.

    Args:
        on_output: called on the event loop with each non-empty output. A step has two
            outputs: its plan (reserved pages, refusals), before anything is computed, and its
            results. With lookahead, the results are those of the previous step.
        on_fault: called on the event loop with an exception inside a step. That is a bug, and the
            process is expected to end, because the state of the pages is unknown.

    Attributes:
        submitted: number of commands submitted since the start; see `EngineLoad.commands`.
        load: load after the last step.
        page_plan: computes the numbers of pages that sequences need.
        pages_total: number of pages of each page group.
        plan_times: seconds that `Engine.plan` took in each step; a reader removes them. If the
            in-flight step had to be read before the launch, they include this wait.
        decode_times: duration of each step that decoded sequences, in seconds, which is the time
            between two tokens of a sequence; a reader removes them.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_output: Callable[[StepOutput], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_output = on_output
        self._on_fault = on_fault
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Command | _Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.submitted = self._taken = 0
        self._steps = 0
        self._busy_s = 0.0
        self._since = time.perf_counter()
        self._stall = Stall(
            lambda: f"self/task/{self._thread.native_id}",
            by_processor=engine.executor.device.type == "cpu",
        )
        self._idle = True
        self._prompt_rate = Rate(_RATE_MEMORY_S, _RATE_KNOWN_AFTER_S)
        self._meter = PaceMeter()
        # Amount of work of the step that was planned last.
        self._size: StepSize | None = None
        self.plan_times: deque[float] = deque(maxlen=MAX_TIMES)
        self.decode_times: deque[float] = deque(maxlen=MAX_TIMES)
        self.load = self._measure()
        self.page_plan: PagePlan = engine.executor.shape.plan
        self.pages_total = engine.scheduler.pages.total

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def step_s(self) -> float:
        """Seconds since the current step, or a job before it, began; 0 while there is no work."""
        return 0.0 if self._idle else time.perf_counter() - self._since

    @property
    def pace(self) -> StepPace | None:
        """Means over recent steps, see `services.common.pace`; None if no step was recorded.

        The current step counts if it has already taken longer than the mean.
        """
        elapsed_s, size = time.perf_counter() - self._since, self._size
        if self._idle or size is None:
            return self._meter.pace(idle_s=elapsed_s)
        return self._meter.pace(current=_measured(elapsed_s, size))

    @property
    def inter_token_s(self) -> float:
        """Mean duration of recent steps that decoded sequences, in seconds; 0 if unknown."""
        return self._meter.inter_token_s

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread made progress in the current step; 0 while there is no work."""
        return self._stall.seconds(self.step_s)

    def cached_tokens(self, request: Request, purpose: Purpose = Purpose.RECEIVE) -> int:
        """Return how many tokens of a request are in cached pages now.

        It is called on the event loop, at the same time as a step, which is safe (`PagePool.find`).
        The result is a hint, because pages may be evicted at any time.
        """
        return self._engine.scheduler.cached_tokens(request, purpose)

    def uncached_tokens(self, request: Request) -> int | None:
        """Return how many prompt tokens of a request this worker would have to compute now.

        See `Scheduler.uncached_tokens`. It is called on the event loop, as `cached_tokens` is.
        """
        return self._engine.scheduler.uncached_tokens(request)

    def submit(self, *commands: Command) -> None:
        """Queue commands for the next step. Called on the event loop."""
        self.submitted += len(commands)
        for command in commands:
            self._inbox.put(command)

    def run(self, job: Callable[[Engine], T]) -> "asyncio.Future[T]":
        """Run ``job`` on the engine thread between two steps; return a future of its result."""
        future: Future[T] = Future()

        def call(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job(engine))
            except Exception as error:  # noqa: BLE001 - raised again where the job is awaited
                future.set_exception(error)

        self._inbox.put(_Job(call))
        return asyncio.wrap_future(future, loop=self._loop)

    async def stop(self, wait_s: float = STOP_S) -> None:
        """End the thread after its current step. Commands that it has not taken may be dropped.

        A thread that hangs in a device call is abandoned after ``wait_s``, so that the process
        ends. If ``wait_s`` is 0, the thread is not waited for, and no error is logged.
        """
        self._inbox.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, wait_s)
        if wait_s and self._thread.is_alive():
            log.error("engine thread did not end", waited_s=wait_s)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed because the process is ending
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _measure(self) -> EngineLoad:
        engine = self._engine
        return EngineLoad(
            commands=self._taken,
            queue_tokens=engine.scheduler.queue_tokens,
            pending_prompt_tokens=engine.scheduler.pending_prompt_tokens,
            prompt_tokens_per_s=self._prompt_rate.per_s or 0.0,
            pages_free=engine.scheduler.pages.free,
            running=engine.scheduler.num_running,
            waiting=engine.scheduler.num_waiting,
            steps=self._steps,
            busy_s=self._busy_s,
            prefixes=engine.scheduler.pages.prefixes.counts,
        )

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._round():
                    pass
        except BaseException as error:  # noqa: BLE001 - reported: the process ends on it
            self._post(self._on_fault, error)

    def _round(self) -> bool:
        """Take incoming commands and run a step; return False to end the thread.

        At most one job is run, before the step. Commands submitted before the job are taken by a
        step of their own, which precedes the job.
        """
        commands: list[Command] = []
        block = self._idle = not self._engine.has_work
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                break
            if item is None:
                return False
            if block:
                now = time.perf_counter()
                self._prompt_rate.idle(now - self._since)
                self._since = now
            block = self._idle = False
            if isinstance(item, _Job):
                if commands:  # commands submitted before the job take effect before it
                    self._step(commands)
                    commands = []
                item.call(self._engine)
                break
            commands.append(item)
        self._step(commands)
        return True

    def _step(self, commands: list[Command]) -> None:
        if not commands and not self._engine.has_work:
            return
        self._taken += len(commands)
        began = time.perf_counter()
        planned = self._engine.plan(commands)
        self.plan_times.append(time.perf_counter() - began)
        self._size = self._engine.planned.size if self._engine.planned else None
        self._report(planned)
        output = self._engine.compute()
        if self._engine.awaits_masks:
            # The event loop sends these tokens while masks are computed, which does not hold the
            # interpreter's lock.
            self.load = self._measure()
            self._report(output)
            output = self._engine.sample()
        now = time.perf_counter()
        self._steps += 1
        self._record_pace(now)
        self._busy_s += now - self._since
        if self._size is not None and self._size.prompt_tokens:
            self._prompt_rate.add(self._size.prompt_tokens, now - self._since)
        else:
            self._prompt_rate.idle(now - self._since)
        self._since = now
        self.load = self._measure()
        self._report(output)

    def _record_pace(self, now: float) -> None:
        """Record the step that ends now.

        With lookahead, a step that launches nothing only waits for the previous step. Its duration
        is added to that step.
        """
        step_s, size = now - self._since, self._size
        if size is None or not size.tokens:
            self._meter.extend(step_s)
            return
        self._meter.add(_measured(step_s, size), now)
        if size.decoded:
            self.decode_times.append(step_s)

    def _report(self, output: StepOutput) -> None:
        if output != _NOTHING:
            self._post(self._deliver, output)

    def _deliver(self, output: StepOutput) -> None:
        """Call ``on_output``. Its exception is a fault, because the requests would never end."""
        try:
            self._on_output(output)
        except Exception as error:  # noqa: BLE001 - reported: the process ends on it
            self._on_fault(error)


def _measured(seconds: float, size: StepSize) -> MeasuredStep:
    return MeasuredStep(seconds, size.tokens, size.context, size.decoded)
