"""Agents that two sessions use are added once, and removed after the last of them."""

from concurrent.futures import Future
from typing import Any

import pytest

from headrace.v1 import prefill_pb2 as pb
from services.transfer.errors import PeerLost, PeerRefused
from services.transfer.known_peers import KnownPeers

PEER = pb.Endpoint(agent_name="a", agent_metadata=b"all")


class Endpoint:
    """Records the calls; additions end when their futures are settled."""

    def __init__(self) -> None:
        self.added: list[Future[None]] = []
        self.removed: list[str] = []

    def add_peer(self, name: str, metadata: bytes) -> "Future[None]":
        self.added.append(Future())
        return self.added[-1]

    def remove_peer(self, name: str) -> None:
        self.removed.append(name)


@pytest.fixture
def endpoints() -> list[Any]:
    return [Endpoint(), Endpoint()]


@pytest.fixture
def peers(endpoints: list[Any]) -> KnownPeers:
    return KnownPeers(endpoints)


def test_agent_is_removed_after_its_last_use(peers: KnownPeers, endpoints: list[Any]) -> None:
    futures = [peers.add(0, PEER, user) for user in ("forward", "back")]
    peers.add(1, PEER, "forward")
    assert [len(each.added) for each in endpoints] == [1, 1]
    endpoints[0].added[0].set_result(None)
    assert [future.result(0) for future in futures] == [None, None]
    peers.remove(0, "a", "forward")
    peers.remove(0, "a", "forward")
    peers.remove(0, "a", "nobody")
    peers.remove(0, "b", "forward")
    assert endpoints[0].removed == []
    peers.remove(0, "a", "back")
    assert [each.removed for each in endpoints] == [["a"], []]
    peers.add(0, PEER, "forward")
    assert len(endpoints[0].added) == 2


def test_failed_addition_is_repeated(peers: KnownPeers, endpoints: list[Any]) -> None:
    futures = [peers.add(0, PEER, user) for user in ("forward", "back")]
    endpoints[0].added[0].set_exception(PeerLost("gone"))
    for future in futures:
        with pytest.raises(PeerLost, match="gone"):
            future.result(0)
    again = peers.add(0, PEER, "forward")
    endpoints[0].added[1].set_result(None)
    assert again.result(0) is None


def test_session_that_gives_up_does_not_cancel_the_addition_of_another(
    peers: KnownPeers, endpoints: list[Any]
) -> None:
    first, second = (peers.add(0, PEER, user) for user in ("forward", "back"))
    assert first.cancel()
    peers.remove(0, "a", "forward")
    assert not endpoints[0].added[0].cancelled()
    endpoints[0].added[0].set_result(None)
    assert second.result(0) is None
    assert endpoints[0].removed == []


def test_name_in_use_with_other_metadata_is_refused(peers: KnownPeers) -> None:
    peers.add(0, PEER, "forward")
    other = peers.add(0, pb.Endpoint(agent_name="a", agent_metadata=b"other"), "thief")
    with pytest.raises(PeerRefused, match="other metadata"):
        other.result(0)


def test_unreachable_agent_is_added_again_by_a_new_session(
    peers: KnownPeers, endpoints: list[Any]
) -> None:
    peers.add(0, PEER, "forward")
    peers.add(0, PEER, "back")
    peers.forget(0, "a")
    peers.forget(0, "a")
    assert endpoints[0].removed == ["a"]
    peers.add(0, PEER, "new")
    assert len(endpoints[0].added) == 2
    peers.remove(0, "a", "forward")
    peers.remove(0, "a", "back")
    assert endpoints[0].removed == ["a"], "the new session uses it"
