"""Agents of peers, shared by the sessions of both directions."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from headrace.v1 import prefill_pb2 as pb
from services.transfer.endpoint import KVEndpoint
from services.transfer.errors import PeerRefused


@dataclass
class _Known:
    """An agent that an endpoint has added.

    Attributes:
        users: the sessions that use it.
    """

    metadata: bytes
    added: "Future[None]"
    users: set[object] = field(default_factory=set)


class KnownPeers:
    """Adds the agents of peers to the endpoints of a worker, and removes them after their last use.

    Two workers may have a session in each direction. NIXL knows an agent once, so that neither
    session may remove it while the other one is open. Runs on the event loop.
    """

    def __init__(self, endpoints: Sequence[KVEndpoint]) -> None:
        self._endpoints = endpoints
        self._known: dict[tuple[int, str], _Known] = {}

    def add(self, rank: int, peer: pb.Endpoint, user: object) -> "Future[None]":
        """Let a session use an agent on a rank of this worker.

        Raises (through the future):
            PeerRefused, PeerLost: see `TransferAgent.add_peer`. Also, an agent of this name is in
                use with other metadata.
        """
        key = rank, peer.agent_name
        known = self._known.get(key)
        if known is None or _has_failed(known.added):
            added = self._endpoints[rank].add_peer(peer.agent_name, peer.agent_metadata)
            known = self._known[key] = _Known(peer.agent_metadata, added)
        elif known.metadata != peer.agent_metadata:
            refused: Future[None] = Future()
            refused.set_exception(
                PeerRefused(f"peer {peer.agent_name} was added already, with other metadata")
            )
            return refused
        known.users.add(user)
        return _copy(known.added)

    def remove(self, rank: int, name: str, user: object) -> None:
        """End the use of an agent by a session. Idempotent."""
        known = self._known.get((rank, name))
        if known is None or user not in known.users:
            return
        known.users.discard(user)
        if not known.users:
            self.forget(rank, name)

    def forget(self, rank: int, name: str) -> None:
        """Remove an agent that does not answer, although other sessions use it.

        Their READs then fail, and their notifications are lost, until a new session adds it again.
        """
        if self._known.pop((rank, name), None) is not None:
            self._endpoints[rank].remove_peer(name)


def _has_failed(added: "Future[None]") -> bool:
    return added.done() and added.exception() is not None


def _copy(future: "Future[None]") -> "Future[None]":
    """Return a future with the same result, which a session may cancel without the others."""
    copied: Future[None] = Future()

    def settle(done: "Future[None]") -> None:
        if copied.set_running_or_notify_cancel():
            if error := done.exception():
                copied.set_exception(error)
            else:
                copied.set_result(None)

    future.add_done_callback(settle)
    return copied
