"""Start and supervision of the ranks of a worker, with fakes of their processes."""

from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.loading import running_ranks
from services.worker.ranks import followers
from services.worker.ranks.followers import Followers, RankFault
from services.worker.ranks.messages import Failed
from services.worker.settings import WorkerSettings


class FakeRank(SimpleNamespace):
    """A rank, whose process does not exist."""

    def __init__(self, rank: int = 1, **attributes: Any) -> None:
        super().__init__(rank=rank, pid=0, killed=False, messages=[], **attributes)

    def received(self, message: object) -> None:
        self.messages.append(message)

    def kill(self) -> None:
        self.killed = True

    def join(self, timeout_s: float) -> None:
        """The process has ended."""


def test_message_that_cannot_be_read_is_a_fault() -> None:
    ours, theirs = Pipe()
    rank: Any = FakeRank(control=ours)
    supervised = Followers()
    supervised.ranks = (rank,)
    theirs.send_bytes(b"no pickle")
    supervised._supervise()
    error = supervised.fault.exception(timeout=0)
    assert isinstance(error, RankFault)
    assert "UnpicklingError" in str(error)
    assert rank.messages == [error]
    assert rank.killed


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (None, "rank 1 was ended by SIGKILL"),
        (Failed("no memory", is_refusal=False), "rank 1 failed: no memory"),
    ],
)
def test_rank_that_exits_is_a_fault_before_its_pipe_is_closed(
    last: Failed | None, reason: str
) -> None:
    """On a GPU, the exit of a process takes seconds before its pipes are closed."""
    ours, theirs = Pipe()
    rank: Any = FakeRank(
        control=ours, is_exiting=True, exit_text=lambda: "was ended by SIGKILL", silent_s=None
    )
    supervised = Followers()
    supervised.ranks = (rank,)
    channel: Any = SimpleNamespace(ranks=lambda: [None])
    supervised._channel = channel
    if last is not None:
        theirs.send(last)
    supervised._look()
    assert str(supervised.fault.exception(timeout=0)) == reason
    assert rank.killed
    theirs.close()


@pytest.mark.timeout(10)
def test_rank_that_exits_while_the_worker_ends_is_no_fault() -> None:
    """The pipe of a rank that has ended is always readable."""
    ours, theirs = Pipe()
    theirs.close()
    rank: Any = FakeRank(control=ours, is_exiting=True, exit_text=lambda: "exited with code 0")
    supervised = Followers()
    supervised.ranks = (rank,)
    channel: Any = SimpleNamespace(ranks=lambda: [None])
    supervised._channel = channel
    supervised._is_ending = True
    supervised._look()
    assert not supervised.fault.done()


async def test_ranks_end_if_a_later_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FakeRank] = []

    def start(*_: object) -> FakeRank:
        if started:
            raise OSError("too many open files")
        started.append(FakeRank())
        return started[0]

    monkeypatch.setattr(followers, "RankHandle", start)
    settings = WorkerSettings.model_validate({"device": "cpu", "codec": "raw", "tp": 3})
    with pytest.raises(OSError, match="too many open files"):
        async with running_ranks(settings, "decode", decodes=True):
            pass
    assert started[0].killed
