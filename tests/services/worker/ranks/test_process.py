"""Reports of the process of a rank before it ends."""

import os
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from runtime.errors import FirstRankEnded
from services.transfer.errors import TransferClosed
from services.worker.rank_loading import refusing
from services.worker.ranks.messages import Failed, RankStart
from services.worker.ranks.process import RankProcess
from services.worker.ranks.rendezvous import Rendezvous
from services.worker.settings import WorkerSettings


class Pipe:
    """The end of the rank."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


class Closed(Pipe):
    """The same, after the process of the first rank has ended."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self._error = error

    def send(self, _: object) -> None:
        raise BrokenPipeError

    def recv(self) -> object:
        raise self._error


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the exit codes of the process, which continues."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def process_with(pipe: Pipe) -> RankProcess:
    settings = WorkerSettings.model_validate({"codec": "raw", "model": "m", "tp": 2})
    unused: Any = None
    control: Any = pipe
    start = RankStart(settings, "decode", 1, decodes=True)
    return RankProcess(start, Rendezvous("", 2, 60), unused, control, unused)


def test_fault_of_the_transfer_is_reported(ended: list[int]) -> None:
    pipe, fault = Pipe(), Future[None]()
    fault.add_done_callback(process_with(pipe)._transfer_failed)
    fault.set_exception(TransferClosed("NIXL failed"))
    assert pipe.sent == [Failed("TransferClosed('NIXL failed')", is_refusal=False)]
    assert ended == [1]


@pytest.mark.parametrize("serves", [False, True])
def test_out_of_memory_is_a_refusal_until_the_rank_serves(ended: list[int], serves: bool) -> None:
    pipe = Pipe()
    process = process_with(pipe)
    process._serves = serves
    process.fail(torch.OutOfMemoryError("no memory"))
    (failed,) = pipe.sent
    assert isinstance(failed, Failed)
    assert failed.is_refusal is not serves
    assert ("rank 1: not enough GPU memory for m" in failed.text) is not serves
    assert ended == [1]


def test_end_of_the_first_rank_is_not_reported_to_it(ended: list[int]) -> None:
    pipe = Closed(BrokenPipeError)
    process_with(pipe).fail(FirstRankEnded("it ended"))
    assert not pipe.sent
    assert ended[0] == 1


def test_truncated_file_is_reported(ended: list[int]) -> None:
    pipe = Pipe()
    process_with(pipe).fail(EOFError("the file ends early"))
    assert pipe.sent == [Failed("EOFError('the file ends early')", is_refusal=False)]
    assert ended == [1]


@pytest.mark.parametrize("error", [EOFError, BrokenPipeError, ConnectionResetError])
def test_closed_pipe_is_the_end_of_the_first_rank(error: type[Exception]) -> None:
    process = process_with(Closed(error))
    with pytest.raises(FirstRankEnded), refusing(process._start.settings, 1):
        process.known_files()
    with pytest.raises(FirstRankEnded), refusing(process._start.settings, 1):
        process._send("message")
