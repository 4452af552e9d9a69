"""State of processes from ``/proc``."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from services.common.process_stat import ProcessStat


def test_running_process_and_thread() -> None:
    stat = ProcessStat.of(os.getpid())
    assert stat is not None
    assert stat.exit_code is None
    assert not stat.zombie
    assert stat.session == os.getsid(0)
    assert stat.processor_s > 0
    thread = ProcessStat.of(f"{os.getpid()}/task/{threading.get_native_id()}")
    assert thread is not None
    assert thread.started_s == stat.started_s


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL])
def test_exit_code_of_a_zombie(code: int) -> None:
    end = "input()" if code < 0 else f"raise SystemExit({code})"
    with subprocess.Popen([sys.executable, "-c", end], stdin=subprocess.PIPE) as child:
        if code < 0:
            child.send_signal(-code)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        stat = ProcessStat.of(child.pid)
        assert stat is not None
        assert (stat.exit_code, stat.zombie) == (code, True)
    assert ProcessStat.of(child.pid) is None
