"""Start and supervision of the ranks of a worker, with fakes of their processes."""

from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.loading import running_ranks
from services.worker.ranks import followers
from services.worker.ranks.followers import Followers, RankFault
from services.worker.settings import WorkerSettings


class FakeRank(SimpleNamespace):
    """A rank, whose process does not exist."""

    def __init__(self, rank: int = 1, **attributes: Any) -> None:
        super().__init__(rank=rank, pid=0, killed=False, messages=[], **attributes)

    def received(self, message: object) -> None:
        self.messages.append(message)

    def kill(self) -> None:
        self.killed = True


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
