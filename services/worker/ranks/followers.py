"""All ranks of a worker other than the first, supervised by the first rank."""

import os
import threading
import time
from concurrent.futures import Future
from multiprocessing import connection

import structlog
import torch

from runtime.checkpoint.hashed_files import HashedFiles
from runtime.engine import Executor, LocalExecutor, Ranks, StepChannel
from runtime.parallel.group import ONE_RANK, RankGroup
from services.common.errors import SettingsError
from services.transfer.codecs import Books
from services.transfer.remote_endpoint import RemoteEndpoint
from services.worker.peers import Peers, RankFacts
from services.worker.ranks.handle import LOOK_S, RankHandle
from services.worker.ranks.messages import Failed, Open, Opened, RankStart, Stage, Started
from services.worker.ranks.rendezvous import Rendezvous
from services.worker.settings import WorkerSettings

log = structlog.get_logger()

_END_S = 12.0
"""Maximum time in which the ranks end after their channel was closed, seconds."""
_KILLED_S = 5.0
"""Maximum time to wait for killed processes to end, seconds."""


class RankFault(Exception):
    """A rank has failed or ended, or makes no progress. The worker must end."""


class Followers(Peers):
    """The ranks of a worker other than the first; none until `start`.

    A thread supervises their processes. If one fails, all of them are killed, because each needs
    the others in every step.

    Attributes:
        ranks: the ranks, from rank 1.
        fault: future that fails with `RankFault` if a rank fails, or with `SettingsError` if it
            cannot start with the settings of the worker. Otherwise it never completes.
    """

    def __init__(self) -> None:
        self.ranks: tuple[RankHandle, ...] = ()
        self.fault: Future[None] = Future()
        self.fault.set_running_or_notify_cancel()  # a reader that is cancelled does not cancel it
        self._stage = Stage.LOADING
        self._is_ending = False

    @property
    def stages(self) -> str:
        """Stage of the start of each rank, this one first, as text."""
        if not self.ranks:
            return self._stage
        stages = [self._stage, *(rank.stage for rank in self.ranks)]
        return ", ".join(f"rank {rank} is {stage}" for rank, stage in enumerate(stages))

    @property
    def pids(self) -> list[int | None]:
        """Ids of the processes of all ranks, this one first."""
        return [os.getpid(), *(rank.pid for rank in self.ranks)]

    @property
    def stalled_s(self) -> list[float]:
        """Seconds since each rank made progress in its current step; 0 while it waits for one."""
        if not self.ranks:
            return []
        return [
            rank.stalled_s(progress)
            for rank, progress in zip(self.ranks, self._channel.ranks(), strict=True)
        ]

    def start(self, settings: WorkerSettings, role: str, *, decodes: bool) -> None:
        """Start a process for each rank. They end when the calling thread does.

        If one cannot be started, `kill` ends those before it.

        Args:
            role: role of the worker, also the name of its service in logs.
            decodes: see `load_rank`.
        """
        if settings.tp == 1:
            return
        self.size = settings.tp
        self._limit_s = settings.rank_timeout_s
        self._rendezvous = Rendezvous.create(settings.tp, step_s=settings.rank_timeout_s)
        self._channel = StepChannel(settings.tp - 1, timeout_s=settings.rank_timeout_s)
        for rank, reader in enumerate(self._channel.readers, 1):
            start = RankStart(settings, role, rank, decodes)
            self.ranks += (RankHandle(start, self._rendezvous, reader),)
        threading.Thread(target=self._supervise, name="ranks", daemon=True).start()

    def share_files(self, files: HashedFiles) -> None:
        for rank in self.ranks:
            rank.send(files)

    def join(self, device: torch.device) -> RankGroup:
        return self._rendezvous.join(0, device) if self.ranks else ONE_RANK

    def agree(self, facts: RankFacts) -> RankFacts:
        self._stage = Stage.WARMING_UP
        agreed = facts
        for rank in self.ranks:
            theirs = rank.receive(RankFacts)
            if different := theirs.mismatches(facts):
                raise SettingsError(f"rank {rank.rank} differs: its {'; its '.join(different)}")
            agreed = agreed.within(theirs)
        for rank in self.ranks:
            rank.send(agreed)
        return agreed

    def executor(self, first: LocalExecutor) -> Executor:
        """Return the executor of all ranks, for the engine."""
        return Ranks(first, self._channel) if self.ranks else first

    def start_endpoints(self, agent: str) -> None:
        """Let the ranks start their KV endpoints, after all of them have warmed up.

        Args:
            agent: prefix of the names of the endpoints' agents.
        """
        for rank in self.ranks:
            rank.send(Open(f"{agent}-{rank.rank}"))

    def endpoints(self, codebooks: Books) -> list[RemoteEndpoint]:
        """Wait for the KV endpoints of the ranks.

        Raises:
            RankFault, SettingsError: a rank has failed.
        """
        for rank in self.ranks:
            rank.receive(Opened)
        return [rank.endpoint(codebooks) for rank in self.ranks]

    def end(self) -> None:
        """End the processes after their last step. Kill those that do not end in time."""
        self._is_ending = True
        if self.ranks:
            self._channel.close()
        self._join(_END_S)
        self.kill()

    def kill(self) -> None:
        """Kill the processes and wait for their end. Calls that wait for one raise `RankFault`."""
        self._is_ending = True
        for rank in self.ranks:
            rank.received(RankFault("the worker is stopping"))
            rank.kill()
        self._join(_KILLED_S)

    def _join(self, timeout_s: float) -> None:
        """Wait until all processes have ended, at most ``timeout_s`` in total."""
        deadline = time.monotonic() + timeout_s
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))

    def _supervise(self) -> None:
        """Watch the ranks until one fails. If they cannot be watched, that is a fault, too."""
        try:
            self._watch()
        except Exception as error:
            log.exception("ranks are not supervised")
            self._end_with(RankFault(f"ranks cannot be supervised: {error!r}"))

    def _watch(self) -> None:
        """Take the messages of the ranks, and look at their beats, until one fails."""
        by_pipe = {rank.control: rank for rank in self.ranks}
        while not (self.fault.done() or self._is_ending):
            for pipe in connection.wait(by_pipe, LOOK_S):
                self._take(by_pipe[pipe])  # type: ignore[index]  # one of these pipes
            self._look()

    def _look(self) -> None:
        for rank, progress in zip(self.ranks, self._channel.ranks(), strict=True):
            if rank.is_exiting:
                self._take_last(rank)
            elif (silent_s := rank.silent_s(progress)) > self._limit_s:
                self._fail(rank, f"has not run for {silent_s:.0f} s")

    def _take_last(self, rank: RankHandle) -> None:
        """Take the remaining messages of an exiting process, then report that it has failed.

        Its pipe may stay open for seconds, until the exit is complete.
        """
        while not (self.fault.done() or self._is_ending) and rank.control.poll():
            self._take(rank)
        self._fail(rank, rank.exit_text())

    def _take(self, rank: RankHandle) -> None:
        try:
            message = rank.control.recv()
        except (EOFError, OSError):
            self._fail(rank, rank.exit_text())
            return
        match message:
            case Failed(text, is_refusal=True):
                self._fail(rank, "cannot start", SettingsError(text))
            case Failed(text):
                self._fail(rank, f"failed: {text}")
            case Started():
                rank.stage = Stage.LOADING
            case RankFacts():
                rank.stage = Stage.WARMING_UP
                rank.weight_bytes = message.weight_bytes
                rank.received(message)
            case Opened(device_bytes):
                rank.stage = Stage.SERVING
                rank.device_bytes = device_bytes
                rank.received(message)
            case _:
                rank.received(message)

    def _fail(self, rank: RankHandle, what: str, refusal: SettingsError | None = None) -> None:
        """Report a failed rank, and kill all ranks."""
        if self._is_ending or self.fault.done():
            return
        error = refusal or RankFault(f"rank {rank.rank} {what}")
        log.error("rank failed", failed_rank=rank.rank, pid=rank.pid, reason=str(error))
        self._end_with(error)

    def _end_with(self, error: SettingsError | RankFault) -> None:
        """Let `fault` fail, unless it has, and kill all ranks."""
        if self.fault.done():
            return
        self.fault.set_exception(error)
        for each in self.ranks:
            each.received(error)
            each.kill()
