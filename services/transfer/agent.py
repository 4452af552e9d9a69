"""The transfer agent: READs from peers through NIXL, on one thread.

NIXL's agent is not thread-safe, and over shared memory it copies inside the call that starts a
transfer, so it must not run on an event loop. Calls are queued as commands for
the owner thread and return a `concurrent.futures.Future`.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from services.transfer.errors import TransferClosed, TransferError
from services.transfer.network import TransferNetwork
from services.transfer.owner import Owner, ReadDone
from services.transfer.slab import Slab

__all__ = ["ReadDone", "TransferAgent"]

log = structlog.get_logger()

CLOSE_S = 10.0  # maximum seconds to shut NIXL down, after the grace period


@dataclass(frozen=True)
class _Command:
    """A call that the owner thread executes; it completes ``future`` during the call or later."""

    run: "Callable[[Owner, Future[Any]], None]"
    future: "Future[Any]"

    def execute(self, owner: Owner) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.run(owner, self.future)
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
    that ends the owner thread closes the agent: every future fails with TransferClosed. The process
    should then end.

    Args:
        name: unique among all agents, for example a role and an epoch.
        device: torch device of the slabs.
        network: devices and ports that UCX may use; default: UCX chooses.

    Attributes:
        fault: future that fails with the exception if a bug ends the owner thread. Otherwise it
            never completes.

    Raises:
        TransferUnavailable: NIXL or its UCX plugin does not start here.
        SettingsError: this machine has no interface with the name given in ``network``.
    """

    def __init__(
        self, name: str, device: str = "cpu", *, network: TransferNetwork | None = None
    ) -> None:
        self.name = name
        self.fault: Future[None] = Future()
        self._device = device
        self._network = network or TransferNetwork()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._grace_s = 0.0
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="transfer", daemon=True
        )
        self._thread.start()
        started.result()

    def register(self, slab: Slab) -> None:
        """Make a slab readable by peers and usable as a READ target. Blocks; used at start-up.

        Raises:
            TransferUnavailable: the transport refuses the memory.
        """
        self._call(lambda owner, future: owner.register(slab, future)).result()

    @property
    def metadata(self) -> bytes:
        """Connection data for peers, valid once all slabs are registered. Blocks."""
        future: Future[bytes] = self._call(lambda owner, future: owner.metadata(future))
        return future.result()

    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        """Make a peer readable. This cancels a removal of the peer that is in progress.

        Raises (through the future):
            PeerRefused: malformed metadata, metadata of another agent, or a known peer.
            PeerLost: the peer does not answer.
        """
        return self._call(lambda owner, future: owner.add_peer(name, metadata, future))

    def remove_peer(self, name: str) -> "Future[None]":
        """Remove a peer once its running READs have ended; new READs fail. Idempotent."""
        return self._call(lambda owner, future: owner.remove_peer(name, future))

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
            deadline_s: seconds from now.
            kind: the peer's memory, "DRAM" or "VRAM".
            device: device number of the peer's memory.

        Raises (through the future):
            PeerLost, BadAddress, ReadFailed, TransferClosed: nothing touches ``local`` any more.
            ReadTimeout: the transport may write to ``local`` until `ReadTimeout.drained` is done.
        """
        deadline = time.monotonic() + deadline_s
        remote = (remote_address, length, device)
        return self._call(
            lambda owner, future: owner.read(peer, remote, kind, local, deadline, future)
        )

    def close(self, grace_s: float = 1.0) -> None:
        """Wait up to ``grace_s`` for running READs, then shut down. Blocks. Idempotent.

        Remaining READs fail with TransferClosed once nothing can touch their landing slots. A
        thread that hangs inside NIXL is abandoned.
        """
        with self._gate:
            if not self._closed:
                self._closed = True
                self._grace_s = grace_s
                self._commands.put(None)
        self._thread.join(grace_s + CLOSE_S)
        if self._thread.is_alive():
            log.error("transfer thread did not end", waited_s=grace_s + CLOSE_S)

    def _call(self, run: "Callable[[Owner, Future[Any]], None]") -> "Future[Any]":
        future: Future[Any] = Future()
        with self._gate:
            if not self._closed:
                self._commands.put(_Command(run, future))
                return future
        future.set_exception(TransferClosed(f"agent {self.name} is closed"))
        return future

    def _run(self, started: "Future[None]") -> None:
        try:
            owner = Owner(self.name, self._device, self._network)
        except BaseException as error:  # noqa: BLE001 - raised again by the constructor
            self._closed = True
            started.set_exception(error)
            return
        started.set_result(None)
        fault: BaseException | None = None
        for stage in (self._serve, self._end):
            try:
                stage(owner)
            except BaseException as error:  # noqa: BLE001 - reported: the process ends on it
                fault = fault or error
        if fault is not None:
            self.fault.set_exception(fault)

    def _end(self, owner: Owner) -> None:
        with self._gate:
            self._closed = True
        try:
            owner.close(self._grace_s)
        finally:
            while not self._commands.empty():
                if command := self._commands.get():
                    command.refuse(self.name)

    def _serve(self, owner: Owner) -> None:
        while True:
            try:
                command = self._commands.get(timeout=owner.poll_delay())
            except queue.Empty:
                pass
            else:
                if command is None:
                    return
                command.execute(owner)
            owner.poll()
