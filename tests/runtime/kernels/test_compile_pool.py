"""The pool of compiling processes: parallel results, and processes that fail, end or hang."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.kernels.compile_pool import CompilePool, PoolStatus, default_processes
from runtime.kernels.launches import KernelSource

LIMIT_S = 60.0

FAKE = """
import os, pickle, sys, time
open(sys.argv[1] + "/" + str(os.getpid()), "w").close()
while True:
    try:
        source = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    if source.name == "hangs":
        time.sleep(600)
    if source.name == "crashes":
        os.abort()
    print("no such kernel" if source.name == "fails" else "", flush=True)
"""
"""A compiling process that does what the name of the kernel says."""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return [sys.executable, "-c", FAKE, str(tmp_path)]


@pytest.fixture(autouse=True)
def all_processes_end(tmp_path: Path) -> Iterator[None]:
    yield
    for pid in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.name), 0)


def kernel(name: str) -> KernelSource:
    return KernelSource("module", name, False, "", {}, {}, {}, None, {})


def run(names: list[str], command: list[str], processes: int, limit_s: float) -> PoolStatus:
    with CompilePool(processes, kernel_limit_s=limit_s, command=command) as pool:
        for name in names:
            pool.submit(kernel(name))
        return pool.wait()


def test_all_kernels_are_compiled_and_progress_is_reported(command: list[str]) -> None:
    seen: list[int] = []
    with CompilePool(2, command=command) as pool:
        for number in range(20):
            pool.submit(kernel(f"k{number}"))
        status = pool.wait(lambda status: seen.append(status.done))
        assert status == PoolStatus(20, 20, [])
        pool.submit(kernel("later"))
        assert pool.wait() == PoolStatus(21, 21, [])
    assert seen == sorted(set(seen))
    assert seen[-1] == 20


def test_nothing_to_compile_does_not_block(command: list[str]) -> None:
    assert run([], command, 2, LIMIT_S) == PoolStatus(0, 0, [])


def test_kernel_with_an_error_does_not_stop_the_others(command: list[str]) -> None:
    status = run(["a", "fails", "b"], command, 1, LIMIT_S)
    assert status == PoolStatus(3, 3, ["fails: no such kernel"])


def test_process_that_crashes_leaves_its_queue_to_the_others(command: list[str]) -> None:
    status = run(["crashes", *"abcdef"], command, 2, LIMIT_S)
    assert status == PoolStatus(7, 7, [f"crashes: the process ended with code -{signal.SIGABRT}"])


def test_pool_without_processes_left_reports_kernels_that_are_not_done(command: list[str]) -> None:
    status = run(["crashes", "a", "b"], command, 1, LIMIT_S)
    assert (status.submitted, status.done, len(status.errors)) == (3, 1, 1)


def test_process_that_hangs_is_killed_after_the_limit(command: list[str]) -> None:
    started = time.monotonic()
    status = run(["hangs", *"abc"], command, 2, 2.0)
    assert status == PoolStatus(4, 4, ["hangs: not compiled within 2 s"])
    assert time.monotonic() - started < 30


def test_leaving_the_pool_early_kills_its_processes(command: list[str]) -> None:
    started = time.monotonic()
    with CompilePool(2, command=command) as pool:
        for _ in range(5):
            pool.submit(kernel("hangs"))
    assert time.monotonic() - started < 30


def test_missing_program_is_an_error_of_the_pool_only() -> None:
    status = run(["a"], ["/does/not/exist"], 2, LIMIT_S)
    assert (status.submitted, status.done) == (1, 0)
    assert all("cannot start" in error for error in status.errors)


def test_kernel_that_cannot_be_pickled_is_an_error(command: list[str]) -> None:
    with CompilePool(1, command=command) as pool:
        pool.submit(KernelSource("module", "local", False, "", {"x": lambda: 0}, {}, {}, None, {}))
        pool.submit(kernel("a"))
        status = pool.wait()
    assert (status.done, len(status.errors)) == (2, 1)
    assert status.errors[0].startswith("local: cannot be pickled")


def test_default_number_of_processes_is_bounded_by_cores() -> None:
    assert 1 <= default_processes() <= len(os.sched_getaffinity(0))


def test_processes_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and not _is_zombie(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


_PARENT = """
import time
from runtime.kernels.compile_pool import CompilePool
pool = CompilePool(1)
while not pool._children:
    time.sleep(0.01)
print(next(iter(pool._children)).pid, flush=True)
time.sleep(600)
"""


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
