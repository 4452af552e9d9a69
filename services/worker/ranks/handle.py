"""The process of one rank, as the first rank of the worker sees it."""

import multiprocessing
import queue
import signal
from contextlib import suppress
from typing import TypeVar

from runtime.engine import RankProgress, StepReader
from services.common.process_stat import ProcessStat
from services.transfer.codecs import Books
from services.transfer.remote_endpoint import RemoteEndpoint
from services.worker.device import torch_device
from services.worker.ranks.messages import RankStart, Stage
from services.worker.ranks.process import run_rank
from services.worker.ranks.rendezvous import Rendezvous
from services.worker.stall import Stall

LOOK_S = 0.25
"""Time between two looks at the beats of the ranks, seconds."""
_CONTEXT = multiprocessing.get_context("spawn")

M = TypeVar("M")


class RankHandle:
    """The process of one rank and its pipes.

    Args:
        start: what the process is started with.
        reader: steps of the first rank.

    Attributes:
        rank: number of the rank.
        stage: how far it has started.
        control: pipe for the messages of `services.worker.ranks.messages`.
        weight_bytes: size of its weights; 0 until its part of the model is loaded.
        device_bytes: bytes that it has allocated on its GPU; 0 until its endpoint is ready.
    """

    def __init__(self, start: RankStart, rendezvous: Rendezvous, reader: StepReader) -> None:
        self.rank = start.rank
        self.stage = Stage.STARTING
        self.weight_bytes = self.device_bytes = 0
        self.control, control = _CONTEXT.Pipe()
        self._endpoint, endpoint = _CONTEXT.Pipe()
        self._received: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._process = _CONTEXT.Process(
            target=run_rank,
            args=(start, rendezvous, reader, control, endpoint),
            name=f"rank {start.rank}",
        )
        self._process.start()
        # The main thread, which computes the steps, has the id of the process.
        on_cpu = torch_device(start.settings.device).type == "cpu"
        self._stall = Stall(lambda: f"{self.pid}/task/{self.pid}", by_processor=on_cpu)
        self._silence = Stall(lambda: f"{self.pid}", by_processor=True, pause_s=2 * LOOK_S)
        for end in (control, endpoint):
            end.close()  # otherwise, the end of the process would not close the pipe

    @property
    def pid(self) -> int | None:
        """Id of the process."""
        return self._process.pid

    def stalled_s(self, progress: RankProgress) -> float:
        """Return the seconds since the rank made progress in its step; 0 while it waits for one."""
        return self._stall.seconds(progress.busy_s)

    def silent_s(self, progress: RankProgress) -> float:
        """Return the seconds for which the process has neither beaten nor used the processor.

        Compilers may hold the lock of the interpreter, which a beat needs. While the process is
        starting, it does not beat, and the result is 0. To be called every `LOOK_S`.
        """
        silent_s = 0.0 if self.stage is Stage.STARTING else progress.silent_s
        return self._silence.seconds(silent_s)

    def send(self, message: object) -> None:
        """Send a message. The process may have ended; this is then reported as a fault."""
        with suppress(OSError):
            self.control.send(message)

    def received(self, message: object) -> None:
        """Pass on a message of the process, or the exception that waiting for one must raise."""
        self._received.put(message)

    def receive(self, kind: type[M]) -> M:
        """Wait for the next message, which is of a certain type.

        Raises:
            RankFault, SettingsError: a rank has failed, see `Followers.fault`.
        """
        message = self._received.get()
        if isinstance(message, BaseException):
            self._received.put(message)  # for later calls
            raise message
        if not isinstance(message, kind):
            raise TypeError(f"rank {self.rank} sent {message!r}, not {kind.__name__}")
        return message

    def endpoint(self, codebooks: Books) -> RemoteEndpoint:
        """Return the KV endpoint of the rank, which must be ready."""
        return RemoteEndpoint(self._endpoint, codebooks)

    @property
    def is_exiting(self) -> bool:
        """Whether the process has begun to exit, or has exited."""
        stat = ProcessStat.of(f"{self.pid}")
        return stat is None or stat.exit_code is not None

    def exit_text(self) -> str:
        """Return how the process ended. It must be exiting, or have closed its pipe."""
        stat = ProcessStat.of(f"{self.pid}")
        code = self._process.exitcode if stat is None else stat.exit_code
        if code is None:
            return "closed its pipe"
        return (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        )

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the process."""
        self._process.join(timeout_s)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process, and do not wait for its end."""
        self._process.kill()
