"""The engine's thread: it owns the engine, its pages and its device; nobody else touches them."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch

from runtime.engine import Command, Engine, StepOutput
from runtime.kv.cache import PagedCache

T = TypeVar("T")

log = structlog.get_logger()

STOP_S = 10.0  # for a step and the jobs before it, when the process ends

_NOTHING = StepOutput()


@dataclass(frozen=True)
class EngineLoad:
    """What a worker tells of itself, as of its last step; ``busy_s`` is what its ``steps`` took,
    each from the one before it, or from what it had waited for."""

    queue_tokens: int
    pages_free: int
    running: int
    waiting: int
    steps: int
    busy_s: float


@dataclass(frozen=True)
class _Job:
    call: Callable[[Engine], None]


class EngineThread:
    """Runs the engine's steps, and the codec's jobs between them.

    Commands go in through `submit`; each step's output comes out through ``on_output``, which is
    called on the event loop: first what was decided, before anything is computed, then what was
    computed (in the step before, by an engine that runs ahead), each only where there is any. A
    fault inside a step is a bug: it is reported through ``on_fault``, and the process is expected
    to end, since the state of the pages is unknown.
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
        self._steps, self._busy_s, self._since = 0, 0.0, time.perf_counter()
        self.load = self._measure()
        self.pages_total = engine.pages_total

    def start(self) -> None:
        self._thread.start()

    def submit(self, *commands: Command) -> None:
        """Hands commands to the next step. Safe from any thread."""
        for command in commands:
            self._inbox.put(command)

    def run(self, job: Callable[[Engine], T]) -> "asyncio.Future[T]":
        """Runs ``job`` on the engine's thread between two steps; its result comes back here."""
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(error: Exception | None, result: T | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def call(engine: Engine) -> None:
            try:
                result = job(engine)
            except Exception as error:  # noqa: BLE001 - it is raised again where the job was awaited
                self._post(settle, error, None)
            else:
                self._post(settle, None, result)

        self._inbox.put(_Job(call))
        return future

    def run_on_cache(self, job: Callable[[PagedCache], T]) -> "asyncio.Future[T]":
        """Run ``job`` with the KV cache between two steps; see `services.transfer.jobs`."""
        return self.run(lambda engine: job(engine.cache))

    async def stop(self) -> None:
        """Ends the thread after what was submitted before. One that a device does not let go of is
        left behind after `STOP_S`: it must not keep the process from ending."""
        self._inbox.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_S)
        if self._thread.is_alive():
            log.error("the engine's thread does not end", waited_s=STOP_S)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop closed: the process is ending and nobody listens
            return

    def _measure(self) -> EngineLoad:
        engine = self._engine
        return EngineLoad(
            engine.queue_tokens, engine.pages_free, engine.num_running, engine.num_waiting,
            self._steps, self._busy_s,
        )  # fmt: skip

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:  # noqa: BLE001 - reported: the process ends on it
            self._post(self._on_fault, error)

    def _turn(self) -> bool:
        """One round: what came in, at most one job, one step. False when told to end.

        Jobs take turns with steps, so that neither a burst of segments stalls the streams nor
        the streams stall the segments.
        """
        commands: list[Command] = []
        block = not self._engine.has_work
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                break
            if item is None:
                return False
            if block:
                self._since = time.perf_counter()
            block = False
            if isinstance(item, _Job):
                if commands:  # those that came before the job take effect before it
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
        self._tell(self._engine.plan(commands))
        output = self._engine.compute()
        now = time.perf_counter()
        self._steps += 1
        self._busy_s += now - self._since
        self._since = now
        self.load = self._measure()
        self._tell(output)

    def _tell(self, output: StepOutput) -> None:
        if output != _NOTHING:
            self._post(self._hand_out, output)

    def _hand_out(self, output: StepOutput) -> None:
        """On the event loop. Output that is lost would leave its requests without an answer."""
        try:
            self._on_output(output)
        except Exception as error:  # noqa: BLE001 - reported: the process ends on it
            self._on_fault(error)
