"""Signals during the start of a service, and SIGTERM when the parent of a process ends."""

import os
import select
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

START = """
import asyncio, os, sys, time
from types import SimpleNamespace
import uvloop
from services import launch

async def serve(settings):
    print("starting", flush=True)
    await asyncio.to_thread(time.sleep, 60)

os.getpid = lambda pid=os.getpid(): int(sys.argv[1]) or pid
module = SimpleNamespace(serve=serve, loop_factory=uvloop.new_event_loop)
launch._import_service = lambda name: module
launch.run_service("router", [])
"""


@pytest.mark.parametrize(
    ("pid", "code"), [(1, 128 + signal.SIGTERM), (0, -signal.SIGTERM)], ids=["first", "other"]
)
def test_sigterm_ends_a_service_that_is_starting(pid: int, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START, str(pid)], stdout=subprocess.PIPE
    ) as starting:
        assert starting.stdout is not None
        assert starting.stdout.readline() == b"starting\n"
        starting.terminate()
        assert starting.wait(10) == code


def test_sighup_does_not_end_a_service_that_is_starting() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START, "0"], stdout=subprocess.PIPE, start_new_session=True
    ) as starting:
        assert starting.stdout is not None
        assert starting.stdout.readline() == b"starting\n"
        starting.send_signal(signal.SIGHUP)
        starting.terminate()
        assert starting.wait(10) == -signal.SIGTERM


IN_TERMINAL = """
import asyncio, fcntl, os, signal, sys, termios
from services.common.signals import handle_sighup

os.setsid()
fcntl.ioctl(os.open(os.ttyname(0), os.O_RDWR), termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    handle_sighup(lambda: print("reload", flush=True))
    print("started", flush=True)
    await stop.wait()
    print("stopped", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("disposition", "after_the_end"),
    [("SIG_DFL", b"stopped\n"), ("SIG_IGN", b"reload\n")],
    ids=["shell", "nohup"],
)
def test_sighup_reloads_but_the_end_of_the_terminal_stops(
    disposition: str, after_the_end: bytes
) -> None:
    """Otherwise a server would run on, and keep its port and memory, without being noticed."""
    terminal, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, disposition], stdin=theirs, stdout=subprocess.PIPE
    ) as process:
        os.close(theirs)
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == b"reload\n"
        os.close(terminal)
        assert process.stdout.readline() == after_the_end
        if after_the_end != b"stopped\n":
            process.terminate()
            assert process.stdout.readline() == b"stopped\n"
        assert process.wait(10) == 0


def test_child_ends_with_its_parent() -> None:
    child = "import time; print('started', flush=True); time.sleep(60)"
    parent = f"""
import subprocess, sys
from services.common.signals import end_with_parent
subprocess.run([sys.executable, "-c", {child!r}], preexec_fn=end_with_parent)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        process.kill()
        # Only the child holds the other end of the pipe now, which is closed when the child ends.
        assert select.select([process.stdout], [], [], 10)[0]
        assert process.stdout.read() == b""
