"""The transfer agent: READs from peers through NIXL, and codec calls, on one thread.

NIXL's agent is not thread-safe, and over shared memory it copies inside the call that starts a
transfer, so it must not run on an event loop. Calls are queued as commands for the transfer thread
and return a `concurrent.futures.Future`.

Callbacks of these futures run on the transfer thread. A READ's callback can therefore start to
decode what was read without waiting for another thread. On a GPU the transfer thread launches codec
kernels on a CUDA stream of its own, so they neither wait for the engine's kernels nor delay its
launches.
"""

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import torch

from services.transfer.announced import AnnouncedSegments
from services.transfer.codec_calls import CodecCalls, CodecJob, Timed, codec_stream
from services.transfer.errors import TransferClosed, TransferError
from services.transfer.network import TransferNetwork
from services.transfer.nixl_agent import NixlAgent, ReadDone
from services.transfer.slab import Slab

__all__ = ["ReadDone", "TransferAgent"]

T = TypeVar("T")

log = structlog.get_logger()

_PR_SET_TIMERSLACK = 29
CLOSE_S = 10.0
"""Maximum time to shut NIXL down, after the grace period, in seconds."""
_MIN_NAP_S = 20e-6
"""Minimum time between two polls, in seconds."""
_MAX_NAP_S = 150e-6
"""Maximum time between two polls, in seconds."""
_NOTIFICATION_NAP_S = 100e-6
"""Time between two polls if only notifications are expected, in seconds."""


@dataclass(frozen=True)
class _Command:
    """A call on the transfer thread; it completes ``future`` during the call or later."""

    run: "Callable[[NixlAgent, Future[Any]], None]"
    future: "Future[Any]"

    def execute(self, nixl: NixlAgent) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.run(nixl, self.future)
        except TransferError as error:
            self.future.set_exception(error)
        except BaseException as error:  # a bug: it ends the thread and becomes `fault`
            if not self.future.done():
                self.future.set_exception(TransferClosed(f"the transfer thread failed: {error!r}"))
            raise

    def refuse(self, name: str) -> None:
        """Fail a command that will not run."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(TransferClosed(f"agent {name} is closed"))


class TransferAgent:
    """The NIXL agent of this process. All methods are thread-safe.

    A future can be cancelled until its command has begun. A running READ cannot be cancelled. A bug
    that ends the transfer thread closes the agent: every future fails with TransferClosed. The
    process should then end.

    Args:
        name: unique among all agents, for example a role and an epoch.
        device: torch device of the slabs.
        network: devices and ports that UCX may use; default: UCX chooses.

    Attributes:
        fault: future that fails with the exception if a bug ends the transfer thread. Otherwise it
            never completes.

    Raises:
        TransferUnavailable: NIXL or its UCX plugin does not start here.
        SettingsError: this machine has no interface with the name given in ``network``, or UCX
            listens on another address or port than ``network`` allows.
    """

    def __init__(
        self, name: str, device: str = "cpu", *, network: TransferNetwork | None = None
    ) -> None:
        self.name = name
        self.fault: Future[None] = Future()
        self._device = device
        self._network = network or TransferNetwork()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._codec_calls = CodecCalls(on_gpu=torch.device(device).type == "cuda")
        self._listener: AnnouncedSegments | None = None
        # Only the transfer thread uses the agent.
        self._nixl: NixlAgent | None = None
        self._closing_lock = threading.Lock()
        self._closed = False
        self._grace_s = 0.0
        self._busy_since: float | None = None
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="transfer", daemon=True
        )
        self._thread.start()
        started.result()

    @property
    def stalled_s(self) -> float:
        """Seconds since the transfer thread began its current round of calls; 0 while it waits."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def register(self, slab: Slab) -> None:
        """Make a slab readable by peers and usable as a READ target. Blocks; used at start-up.

        Raises:
            TransferUnavailable: the transport refuses the memory.
        """
        self._run_now(lambda nixl: nixl.register(slab)).result()

    @property
    def metadata(self) -> bytes:
        """Data by which peers connect and access all slabs registered so far. Blocks."""
        return self._run_now(NixlAgent.metadata).result()

    @property
    def connection_metadata(self) -> bytes:
        """Data by which peers connect, without access to slabs. Blocks."""
        return self._run_now(NixlAgent.connection).result()

    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        """Make a peer readable. This cancels a removal of the peer that is in progress.

        What the metadata adds to earlier ones, such as another slab, is then readable, too.

        Raises (through the future):
            PeerRefused: malformed metadata, metadata of another agent, or a known peer.
            PeerLost: the peer does not answer.
        """
        return self._run_now(lambda nixl: nixl.add_peer(name, metadata))

    def remove_peer(self, name: str) -> "Future[None]":
        """Remove a peer as soon as its running READs have ended; new READs fail. Idempotent."""
        return self._call(lambda nixl, future: nixl.remove_peer(name, future))

    def read(
        self,
        peer: str,
        remote_address: int,
        length: int,
        local: torch.Tensor,
        *,
        deadline_s: float,
        kind: str = "DRAM",
        device: int = 0,
    ) -> "Future[ReadDone]":
        """Copy ``length`` bytes of a peer's registered memory into ``local``.

        Args:
            local: ``[length]`` uint8, contiguous, inside a registered slab. The agent keeps it
                alive; it must not be touched until the READ has ended.
            deadline_s: seconds without the end of any READ from this peer after which the READ is
                overdue.
            kind: the peer's memory, "DRAM" or "VRAM".
            device: device number of the peer's memory.

        Raises (through the future):
            PeerLost, BadAddress, ReadFailed, TransferClosed: nothing touches ``local`` any more.
            ReadTimeout: the transport may write to ``local`` until `ReadTimeout.drained` is done.
        """
        return self._call(
            lambda nixl, future: nixl.read(
                peer, (remote_address, length, device), kind, local, deadline_s, future
            )
        )

    def notify(self, peer: str, message: bytes) -> None:
        """Send a short message to a peer. It is lost if the peer cannot be reached."""
        self._run_now(lambda nixl: nixl.notify(peer, message))

    def listen(self, listener: AnnouncedSegments) -> None:
        """Deliver notifications to ``listener``; after it starts to wait, call `wake`."""
        self._listener = listener

    def wake(self) -> None:
        """Make the transfer thread read `AnnouncedSegments.waiting` again."""
        self._run_now(lambda _: None)

    def run_codec(self, job: CodecJob[T]) -> "Future[Timed[T] | None]":
        """Run a codec job on the transfer thread. Jobs are started in the order of these requests.

        Returns:
            Future of the result, None if ``job.prepare`` returned False. Futures are settled in the
            order of the requests, except those of jobs that could not be started.

        Raises (through the future):
            TransferClosed: the agent was closed.
        """
        return self._call(lambda _nixl, future: self._codec_calls.add(job, future))

    def codec_idle(self) -> "Future[None]":
        """Return a future that is settled when all earlier codec jobs have ended."""
        return self._call(lambda _nixl, future: self._codec_calls.add(None, future))

    def run_on_codec_stream(self, call: Callable[[], T]) -> "Future[T]":
        """Run ``call`` on the transfer thread with the codec's CUDA stream; used at start-up."""

        def run(_nixl: NixlAgent, future: "Future[T]") -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised again where the future is read
                future.set_exception(error)

        return self._call(run)

    def close(self, grace_s: float = 1.0) -> None:
        """Wait up to ``grace_s`` for running READs, then shut down. Blocks. Idempotent.

        Remaining READs fail with TransferClosed when the transport can no longer write to their
        landing slots. A thread that hangs inside NIXL is abandoned.
        """
        with self._closing_lock:
            if not self._closed:
                self._closed = True
                self._grace_s = grace_s
                self._commands.put(None)
        self._thread.join(grace_s + CLOSE_S)
        if self._thread.is_alive():
            log.error("transfer thread did not end", waited_s=grace_s + CLOSE_S)
            self._refuse_commands()
            self._commands.put(None)  # ends the thread if it ever resumes
            self._codec_calls.close()

    def _run_now(self, call: Callable[[NixlAgent], T]) -> "Future[T]":
        """Queue a command whose result is that of a call."""
        return self._call(lambda nixl, future: future.set_result(call(nixl)))

    def _call(self, run: "Callable[[NixlAgent, Future[Any]], None]") -> "Future[Any]":
        """Queue a command. On the transfer thread itself, execute it at once."""
        command = _Command(run, Future())
        nixl = self._nixl if threading.get_ident() == self._thread.ident else None
        with self._closing_lock:
            if self._closed:
                command.refuse(self.name)
                return command.future
            if nixl is None:
                self._commands.put(command)
        if nixl is not None:
            command.execute(nixl)
        return command.future

    def _run(self, started: "Future[None]") -> None:
        try:
            nixl = NixlAgent(self.name, self._device, self._network)
        except BaseException as error:  # noqa: BLE001 - raised again by the constructor
            self._closed = True
            started.set_exception(error)
            return
        self._nixl = nixl
        started.set_result(None)
        _sleep_precisely()
        fault: BaseException | None = None
        with codec_stream(self._device):
            for stage in (self._serve, self._end):
                try:
                    stage(nixl)
                except BaseException as error:  # noqa: BLE001 - reported: the process ends on it
                    fault = fault or error
        if fault is not None:
            self.fault.set_exception(fault)

    def _end(self, nixl: NixlAgent) -> None:
        with self._closing_lock:
            self._closed = True
        try:
            if torch.device(self._device).type == "cuda":
                torch.cuda.current_stream().synchronize()  # nothing writes to pages after this
            nixl.close(self._grace_s)
        finally:
            self._codec_calls.close()
            self._refuse_commands()

    def _refuse_commands(self) -> None:
        with suppress(queue.Empty):
            while True:
                if command := self._commands.get_nowait():
                    command.refuse(self.name)

    def _serve(self, nixl: NixlAgent) -> None:
        calls = self._codec_calls
        last_event = time.monotonic()
        while True:
            listener = self._listener
            if len(calls) > 0 or nixl.num_running > 0:
                delay: float | None = _poll_delay(time.monotonic() - last_event)
            elif listener is not None and listener.waiting:
                delay = _NOTIFICATION_NAP_S
            else:
                delay = nixl.drain_delay
            active = False
            self._busy_since = None
            with suppress(queue.Empty):
                command = self._commands.get(timeout=delay)
                self._busy_since = time.monotonic()
                while True:
                    if command is None:
                        return
                    command.execute(nixl)
                    active = True
                    command = self._commands.get_nowait()
            self._busy_since = self._busy_since or time.monotonic()
            if listener is not None and listener.waiting:
                for notification in nixl.notifications():
                    listener.notified(*notification)
            active |= nixl.poll()
            calls.start_queued()  # including those of READs that have just ended
            if calls.poll() or active:
                last_event = time.monotonic()


def _sleep_precisely() -> None:
    """Let this thread's short pauses end on time; by default, Linux adds up to 50 microseconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # one nanosecond


def _poll_delay(since_s: float) -> float:
    """Return the seconds until the next poll, given those since the last event.

    Transfers end soon after the last event or much later, so the pauses grow with the wait.
    """
    return min(max(since_s / 8, _MIN_NAP_S), _MAX_NAP_S)
