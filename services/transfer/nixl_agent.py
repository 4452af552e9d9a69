"""The transfer thread's side of a transfer agent: the only code that calls NIXL."""

import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from services.transfer.bindings import load_nixl
from services.transfer.errors import (
    BadAddress,
    PeerLost,
    PeerRefused,
    ReadFailed,
    ReadTimeout,
    TransferClosed,
    TransferError,
    TransferUnavailable,
)
from services.transfer.network import TransferNetwork, checked_listeners
from services.transfer.slab import Slab

_PROGRESS_TIMEOUT_US = 1000
"""Maximum time for which NIXL's progress thread sleeps, in microseconds; with 0 it spins."""
_NAP_S = 150e-6
"""Time between two polls while NIXL shuts down, in seconds."""
_DRAIN_NAP_S = 10e-3
"""Time between two polls if only overdue READs remain, in seconds."""


@dataclass(frozen=True)
class ReadDone:
    """A completed READ.

    Attributes:
        seconds: time from its start to its end.
        busy_s: time by which this READ extended the link's busy time: from its start, or from the
            end of the previous READ from this peer if that is later, to its end.
    """

    seconds: float
    busy_s: float


@dataclass
class _Peer:
    """A known peer.

    Attributes:
        reads: number of its READs that have not ended.
        last_end: end of its last READ, in seconds of `time.monotonic`.
        removals: futures of pending removals.
    """

    reads: int = 0
    last_end: float = 0.0
    removals: list["Future[None]"] = field(default_factory=list)


@dataclass
class _Read:
    """A READ that has not ended.

    Attributes:
        local: the landing memory, which must stay alive.
        drained: `ReadTimeout.drained` if the READ is overdue, else None.
    """

    peer: str
    handle: int
    local: torch.Tensor
    started: float
    timeout_s: float
    future: "Future[ReadDone]"
    drained: "Future[None] | None" = None

    def is_overdue(self, last_end: float, now: float) -> bool:
        """Return whether no READ from the peer has ended for ``timeout_s``.

        READs share the link, so a READ is not overdue while others from the same peer end.

        Args:
            last_end: when the last READ from the peer has ended.
        """
        return now >= max(self.started, last_end) + self.timeout_s


class NixlAgent:
    """NIXL's agent with its slabs, peers and running READs. Used on one thread only.

    A command that receives a future settles it now or later. Commands may raise a TransferError.

    Raises:
        TransferUnavailable: NIXL or its UCX plugin does not start here.
        SettingsError: UCX listens on an address or port that ``UCX_NET_DEVICES`` or
            ``UCX_TCP_PORT_RANGE`` excludes.
    """

    def __init__(self, name: str, device: str, network: TransferNetwork) -> None:
        self._name = name
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(torch.device(device).index or 0)
            torch.empty(1, device=device)  # UCX needs a CUDA context on this thread when it starts
        nixl = self._api = load_nixl(network)
        self._faults: tuple[type[Exception], ...] = tuple(
            getattr(nixl, error) for error in dir(nixl) if error.endswith("Error")
        )
        self._memory = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}
        config = nixl.nixlAgentConfig()
        config.useProgThread = True  # serves READs of peers while this process makes no NIXL calls
        config.pthrDelay = _PROGRESS_TIMEOUT_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        try:
            with checked_listeners():
                self._nixl = nixl.nixlAgent(name, config)
                self._ucx = [self._nixl.createBackend("UCX", {})]
        except self._faults as error:
            raise TransferUnavailable(
                f"NIXL does not start with UCX ({error}); NIXL_LOG_LEVEL=ERROR shows why"
            ) from error
        self._slabs: list[tuple[Slab, Any]] = []
        self._peers: dict[str, _Peer] = {}
        self._reads: list[_Read] = []

    def register(self, slab: Slab) -> None:
        region = (slab.address, slab.nbytes, slab.device_index, "")
        registration = self._api.nixlRegDList(self._memory[slab.memory_kind], [region])
        try:
            self._nixl.registerMem(registration, self._ucx)
        except self._faults as error:
            raise TransferUnavailable(f"cannot register {slab.nbytes} bytes: {error}") from error
        self._slabs.append((slab, registration))

    def metadata(self) -> bytes:
        return bytes(self._nixl.getLocalMD())

    def connection(self) -> bytes:
        no_memory = self._api.nixlRegDList(self._memory["DRAM"], [])
        return bytes(self._nixl.getLocalPartialMD(no_memory, True, self._ucx))

    def add_peer(self, name: str, metadata: bytes) -> None:
        peer = self._peers.get(name)
        if peer is not None and not peer.removals:
            raise PeerRefused(f"peer {name} was added already")
        try:
            found = self._nixl.loadRemoteMD(metadata).decode(errors="replace")
        except (self._api.nixlRemoteDisconnectError, self._api.nixlBackendError) as error:
            raise PeerLost(f"peer {name} cannot be reached") from error
        except self._faults as error:
            raise PeerRefused(f"invalid metadata of peer {name}: {error}") from error
        if found != name:
            if found not in self._peers:
                self._nixl.invalidateRemoteMD(found)
            raise PeerRefused(f"metadata of peer {name} names {found}")
        if peer is None:
            self._peers[name] = _Peer()
        else:  # NIXL has added to what it knew, and running READs continue
            _settle(peer.removals)

    def remove_peer(self, name: str, future: "Future[None]") -> None:
        peer = self._peers.get(name)
        if peer is None:
            future.set_result(None)
            return
        peer.removals.append(future)
        self._remove_if_idle(name, peer)

    def read(
        self,
        peer_name: str,
        remote: tuple[int, int, int],
        kind: str,
        local: torch.Tensor,
        timeout_s: float,
        future: "Future[ReadDone]",
    ) -> None:
        """Start a READ of ``remote``: (address, length, device); see `TransferAgent.read`."""
        peer = self._peers.get(peer_name)
        if peer is None or peer.removals:
            raise PeerLost(f"peer {peer_name} is not known")
        length = _checked_length(remote, kind, local)
        landing = (local.data_ptr(), length, max(local.get_device(), 0))
        started = time.monotonic()
        handle = None
        try:
            handle = self._nixl.createXferReq(
                self._api.NIXL_READ,
                self._descriptors("VRAM" if local.is_cuda else "DRAM", landing),
                self._descriptors(kind, remote),
                peer_name,
                b"",
                self._ucx,
            )
            self._nixl.postXferReq(handle, b"")
        except self._faults as error:
            if handle is not None:
                self._release(handle)
            raise self._explain(error, peer_name) from error
        peer.reads += 1
        self._reads.append(_Read(peer_name, handle, local, started, timeout_s, future))

    def notify(self, peer_name: str, message: bytes) -> None:
        """Send a notification, which is lost if the peer is not known or does not answer."""
        peer = self._peers.get(peer_name)
        if peer is None or peer.removals:
            return
        with suppress(*self._faults):
            self._nixl.genNotif(peer_name, message, self._ucx)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return the received notifications, each with the name of its sender."""
        try:
            received = self._nixl.getNotifs({}, self._ucx)
        except self._faults:
            return []
        except UnicodeDecodeError:  # a sender's name is not UTF-8
            return []
        return [(peer, message) for peer, messages in received.items() for message in messages]

    @property
    def num_running(self) -> int:
        """Number of READs that are not overdue."""
        return sum(read.drained is None for read in self._reads)

    @property
    def drain_delay(self) -> float | None:
        """Seconds until the next poll if only overdue READs are left, or None."""
        return _DRAIN_NAP_S if self._reads else None

    def poll(self) -> bool:
        """Settle the READs that have ended or are overdue.

        Returns:
            Whether any READ has ended.
        """
        before = len(self._reads)
        running = []
        now = time.monotonic()
        for read in self._reads:
            try:
                state = self._nixl.getXferStatus(read.handle)
            except self._faults as fault:
                self._finish(read, self._explain(fault, read.peer))
                continue
            if state == self._api.NIXL_IN_PROG:
                running.append(read)
                if read.drained is None and read.is_overdue(self._peers[read.peer].last_end, now):
                    _expire(read)
            elif state == self._api.NIXL_SUCCESS:
                self._finish(read, None)
            else:
                self._finish(read, ReadFailed(f"READ from {read.peer} ended with status {state}"))
        self._reads = running
        return len(running) < before

    def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for READs, then shut NIXL down; remaining READs fail.

        Every future is settled, even if this raises.
        """
        try:
            end = time.monotonic() + grace_s
            while self._reads and time.monotonic() < end:
                time.sleep(_NAP_S)
                self.poll()
            self._shut_down()
        finally:
            for read in self._reads:
                self._fail_closed(read)
            for peer in self._peers.values():
                _settle(peer.removals)

    def _shut_down(self) -> None:
        for read in self._reads:
            self._release(read.handle)
        for name in self._peers:
            self._nixl.invalidateRemoteMD(name)
        for _, registration in self._slabs:
            self._nixl.deregisterMem(registration, self._ucx)
        del self._nixl  # its destructor closes the connections and ends the READs

    def _fail_closed(self, read: _Read) -> None:
        """Settle the futures of a READ that the shutdown has ended."""
        if read.drained is not None:
            if not read.drained.done():
                read.drained.set_result(None)
        elif not read.future.done():
            read.future.set_exception(TransferClosed(f"agent {self._name} is closed"))

    def _finish(self, read: _Read, error: TransferError | None) -> None:
        self._release(read.handle)
        now = time.monotonic()
        peer = self._peers[read.peer]
        busy_s = now - max(read.started, peer.last_end)
        peer.last_end = now
        if read.drained is not None:
            read.drained.set_result(None)
        elif error is not None:
            read.future.set_exception(error)
        else:
            read.future.set_result(ReadDone(now - read.started, busy_s))
        peer.reads -= 1
        self._remove_if_idle(read.peer, peer)

    def _remove_if_idle(self, name: str, peer: _Peer) -> None:
        """Remove a peer if its removal is pending and all of its READs have ended.

        A peer with running READs is kept: only their handles show when nothing writes to the slots.
        """
        if peer.removals and not peer.reads:
            del self._peers[name]
            self._nixl.invalidateRemoteMD(name)
            _settle(peer.removals)

    def _descriptors(self, kind: str, region: tuple[int, int, int]) -> Any:
        return self._api.nixlXferDList(self._memory[kind], [region])

    def _release(self, handle: int) -> None:
        # If the transport cannot cancel it, NIXL frees it with the agent.
        with suppress(*self._faults):
            self._nixl.releaseXferReq(handle)

    def _explain(self, error: Exception, peer: str) -> TransferError:
        if isinstance(error, self._api.nixlRemoteDisconnectError):
            return PeerLost(f"peer {peer} has disconnected")
        if isinstance(error, self._api.nixlNotFoundError):
            return BadAddress(f"the range is outside the memory registered here or by {peer}")
        return ReadFailed(f"READ from {peer} failed: {type(error).__name__} {error}")


def _checked_length(remote: tuple[int, int, int], kind: str, local: torch.Tensor) -> int:
    """Return the length of a READ after checks that NIXL's bindings do not make.

    Raises:
        BadAddress: a value is out of range, or ``local`` does not fit.
    """
    address, length, device = remote
    if kind not in ("DRAM", "VRAM") or not 0 <= device < 1 << 31:
        raise BadAddress(f"invalid memory kind {kind!r} or device {device}")
    if address < 0 or length < 1 or address + length > 1 << 64:
        raise BadAddress(f"invalid range: {length} bytes at {address}")
    if local.dtype != torch.uint8 or local.shape != (length,) or not local.is_contiguous():
        raise BadAddress(
            f"the local tensor must be contiguous uint8 [{length}], "
            f"not {local.dtype} {list(local.shape)}"
        )
    return length


def _expire(read: _Read) -> None:
    read.drained = Future()
    read.drained.set_running_or_notify_cancel()
    read.future.set_exception(
        ReadTimeout(f"no READ from {read.peer} has ended for {read.timeout_s} s", read.drained)
    )


def _settle(futures: list["Future[None]"]) -> None:
    for future in futures:
        future.set_result(None)
    futures.clear()
