"""Processes that outlive the service that has started them."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from services.local.lock import ProcessIdentity
from services.local.sessions import end_session

pytestmark = pytest.mark.timeout(60)

LEADER = """
import subprocess, sys
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def leader() -> Iterator["subprocess.Popen[str]"]:
    """A process that leads a session and has started another one."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def started_by(leader: "subprocess.Popen[str]") -> ProcessIdentity:
    assert leader.stdout is not None
    identity = ProcessIdentity.of(int(leader.stdout.readline()))
    assert identity is not None
    return identity


async def test_processes_of_a_session_end_after_its_leader(
    leader: "subprocess.Popen[str]",
) -> None:
    child = started_by(leader)
    leader.kill()
    leader.wait()
    assert child.alive
    await end_session(leader.pid)
    assert not child.alive


async def test_session_of_a_process_that_runs_is_left_alone(
    leader: "subprocess.Popen[str]",
) -> None:
    child = started_by(leader)
    await end_session(leader.pid)
    assert child.alive
    psutil.Process(child.pid).kill()
