"""A READ that waits for other READs on the same link is not overdue."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from services.transfer.errors import ReadTimeout
from services.transfer.nixl_agent import NixlAgent, ReadDone, _Peer, _Read

RUNNING, DONE = 1, 0


class FakeNixl:
    """Reports the given states of READs."""

    def __init__(self, states: dict[int, int]) -> None:
        self.states = states

    def getXferStatus(self, handle: int) -> int:
        return self.states[handle]

    def releaseXferReq(self, handle: int) -> None:
        del self.states[handle]


def read_of(handle: int, age_s: float) -> _Read:
    future: Future[ReadDone] = Future()
    local = torch.empty(1, dtype=torch.uint8)
    return _Read("peer", handle, local, time.monotonic() - age_s, 10.0, future)


@pytest.fixture
def agent() -> NixlAgent:
    """An agent without NIXL."""
    agent = NixlAgent.__new__(NixlAgent)
    agent._api = SimpleNamespace(NIXL_IN_PROG=RUNNING, NIXL_SUCCESS=DONE)
    agent._faults = ()
    return agent


def test_read_is_overdue_only_without_progress_of_its_peer(agent: NixlAgent) -> None:
    waiting, other = read_of(1, age_s=20), read_of(2, age_s=20)
    peer = _Peer(reads=2, last_end=time.monotonic() - 5)
    agent._peers = {"peer": peer}
    agent._reads = [waiting, other]
    agent._nixl = FakeNixl({1: RUNNING, 2: RUNNING})
    agent.poll()
    assert not waiting.future.done()
    assert not other.future.done()
    agent._nixl.states[2] = DONE
    agent.poll()
    assert other.future.done()
    peer.last_end -= 9
    agent.poll()
    assert not waiting.future.done()
    peer.last_end -= 2
    agent.poll()
    assert isinstance(waiting.future.exception(0), ReadTimeout)
    assert agent.num_running == 0
