"""Faults of the ranks of a running worker: the real service, with a process for each rank."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Any

import grpc
import httpx
import psutil
import pytest

from headrace.v1 import decode_pb2, decode_pb2_grpc
from services.common.grpc_server import MessageStream, next_message, open_channel
from services.common.interpreter import headrace_command
from tests.services.tiny_model import save_tiny_model
from tests.services.workers import LIMIT_S, message_of

pytestmark = pytest.mark.slow

RANK_TIMEOUT_S = 2.0
END_S = 20.0
"""Limit of the end of a worker, which takes about a second, on a busy machine."""
TOKENS = 200


@dataclass
class Service:
    """A colocated worker of two ranks.

    Attributes:
        process: the process of the first rank.
        ready: the worker's log line "ready".
    """

    process: asyncio.subprocess.Process
    log: Path
    ready: dict[str, Any]

    @property
    def pids(self) -> list[int]:
        """Ids of the processes of the ranks."""
        return list(self.ready["pids"])

    def send(self, rank: int, number: Signals) -> None:
        os.kill(self.pids[rank], number)

    @asynccontextmanager
    async def blocked_request(self) -> AsyncIterator[MessageStream]:
        """Stop the second rank and send a request, so that the first one blocks in its prefill."""
        self.send(1, SIGSTOP)
        start = decode_pb2.StartStream(
            stream=1, epoch=self.ready["epoch"], deadline_s=LIMIT_S, request=message_of(TOKENS)
        )
        async with open_channel(f"127.0.0.1:{self.ready['port']}", ping_timeout_s=20) as channel:
            call: MessageStream = decode_pb2_grpc.DecodeStub(channel).Session()
            await call.write(decode_pb2.DecodeCommand(start=start))
            await self._until_stalled()
            yield call

    async def _until_stalled(self) -> None:
        url = f"http://127.0.0.1:{self.ready['metrics_port']}/metrics"
        sample = 'headrace_worker_stalled_seconds{rank="0",thread="engine"} '
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as http:

            async def stalled() -> bool:
                text = (await http.get(url)).text
                return float(text.partition(sample)[2].partition("\n")[0]) > 0.3

            async with asyncio.timeout(LIMIT_S):
                while not await stalled():  # noqa: ASYNC110 - polls
                    await asyncio.sleep(0.05)

    async def exit_code(self) -> int:
        """Return the exit code of the worker, once no process and no shared memory is left."""
        code = await asyncio.wait_for(self.process.wait(), END_S)
        await self.until_gone(0, 1)
        return code

    async def until_gone(self, *ranks: int) -> None:
        async with asyncio.timeout(END_S):
            while any(is_running(self.pids[rank]) for rank in ranks):  # noqa: ASYNC110 - polls
                await asyncio.sleep(0.05)

    def logged(self, event: str) -> list[dict[str, Any]]:
        found = []
        for line in self.log.read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return [record for record in found if record["event"] == event]


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended, but was not waited for, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory_of(pids: list[int]) -> set[Path]:
    """Return the files in ``/dev/shm`` that processes have mapped and that have a name."""
    maps = [psutil.Process(pid).memory_maps(grouped=False) for pid in pids]
    return {Path(each.path) for own in maps for each in own if each.path.startswith("/dev/shm/")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("faults") / "tiny")


@pytest.fixture
async def service(model: Path, tmp_path: Path) -> AsyncIterator[Service]:
    """Run a worker; when the test has ended it, check that nothing is left."""
    log = tmp_path / "worker.log"
    arguments = (
        *("decode", "--colocated", "--model", str(model), "--device", "cpu", "--codec", "raw"),
        *("--tp", "2", "--rank-timeout-s", str(RANK_TIMEOUT_S), "--log-format", "json"),
        *("--slots", "2", "--slot-bytes", str(1 << 16), "--drain-s", "1"),
    )
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            *headrace_command(*arguments), stdout=file, stderr=file
        )
    started = Service(process, log, {})
    try:
        async with asyncio.timeout(LIMIT_S):
            while not started.logged("ready"):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.1)
        started.ready = started.logged("ready")[0]
        shared = shared_memory_of(started.pids)
        yield started
        assert process.returncode is not None
        assert not any(path.exists() for path in shared)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def assert_failed(service: Service, reason: str) -> None:
    (record,) = service.logged("rank failed")
    assert (record["failed_rank"], record["pid"]) == (1, service.pids[1])
    assert record["reason"].startswith(reason)
    assert f"RankFault: {reason}" in service.log.read_text()


async def assert_lost(call: MessageStream) -> None:
    """Check that a call ends as it does when a worker is lost: the gateway fails over."""
    async with asyncio.timeout(END_S):
        with pytest.raises(grpc.aio.AioRpcError):  # noqa: PT012 - the error follows messages
            while await next_message(call) is not None:
                pass


async def test_killed_rank_ends_the_worker_in_a_prefill(service: Service) -> None:
    async with service.blocked_request() as call:
        service.send(1, SIGKILL)
        await assert_lost(call)
        assert await service.exit_code() == 1
    assert_failed(service, "rank 1 was ended by SIGKILL")


@pytest.mark.long
async def test_killed_rank_ends_the_worker_at_rest(service: Service) -> None:
    service.send(1, SIGKILL)
    assert await service.exit_code() == 1
    assert_failed(service, "rank 1 was ended by SIGKILL")


@pytest.mark.long
async def test_stopped_rank_ends_the_worker_at_rest(service: Service) -> None:
    service.send(1, SIGSTOP)
    assert await service.exit_code() == 1
    assert_failed(service, "rank 1 has not run for")


@pytest.mark.long
async def test_stopped_rank_ends_the_worker_in_a_prefill(service: Service) -> None:
    async with service.blocked_request() as call:
        await assert_lost(call)
        assert await service.exit_code() == 1
    assert_failed(service, "rank 1 has not run for")


@pytest.mark.long
@pytest.mark.parametrize("at_rest", [True, False])
async def test_ranks_end_with_the_first_one(service: Service, at_rest: bool) -> None:
    if at_rest:
        service.send(0, SIGKILL)
        assert await service.exit_code() == -SIGKILL
        return
    async with service.blocked_request():
        service.send(0, SIGKILL)
        assert await service.exit_code() == -SIGKILL


@pytest.mark.long
async def test_rank_ends_itself_if_the_first_one_is_stopped_in_a_prefill(service: Service) -> None:
    async with service.blocked_request():
        service.send(0, SIGSTOP)
        service.send(1, SIGCONT)
        await service.until_gone(1)
        service.send(0, SIGCONT)
        assert await service.exit_code() == 1
    assert_failed(service, "rank 1 failed: TimeoutError('a step has made no progress for")


@pytest.mark.long
async def test_stopped_ranks_continue_if_they_are_resumed_in_time(service: Service) -> None:
    for numbers in ((SIGSTOP, SIGSTOP), (SIGCONT, SIGCONT)):
        for rank, number in enumerate(numbers):
            service.send(rank, number)
        await asyncio.sleep(1.2 * RANK_TIMEOUT_S)
    assert service.process.returncode is None
    service.send(0, SIGTERM)
    assert await service.exit_code() == 0
    assert not service.logged("rank failed")
