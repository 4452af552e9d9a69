"""Run tests of Triton kernels on a GPU, or in a child process under Triton's interpreter.

Triton decides at import, for the whole process, whether kernels are interpreted. Tests with the
marker `triton` are collected like any other. On a host with a GPU they run in this process. On a
host without one, the tests of each file run in one child process with `TRITON_INTERPRET=1`, which
runs one test at a time on request. `tests/conftest.py` imports the hooks.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

_INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_PIPE = "HEADRACE_KERNEL_TEST_PIPE"
"""Environment variable with the file descriptor to which a child process writes its reports."""
_children = pytest.StashKey[dict[Path, "_Child"]]()


class _Child:
    """A pytest process that runs tests of one file on request, under Triton's interpreter."""

    def __init__(self, path: Path, root: Path) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", str(path)],
            cwd=root,
            env=os.environ | _INTERPRETED | {_PIPE: str(write)},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[write],
            text=True,
        )
        os.close(write)
        self._reports = os.fdopen(read)

    def run(self, nodeid: str) -> tuple[str, str]:
        """Run one test in the child process; return its outcome and the reason.

        Raises:
            pytest.fail.Exception: if the process has ended.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(nodeid + "\n")
            stdin.flush()
            line = self._reports.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            pytest.fail(f"the child process ended:\n{self._log.read()[-4000:].decode()}", False)
        outcome, reason = json.loads(line)
        return outcome, reason

    def close(self) -> None:
        """Kill the process and close its files."""
        self._process.kill()
        self._process.communicate()
        self._reports.close()
        self._log.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "triton: runs Triton kernels, interpreted where there is no CUDA device"
    )
    config.stash[_children] = {}


def mark_kernel_tests(items: list[pytest.Item]) -> None:
    """Add the marker `gpu` to kernel tests on a host with a GPU."""
    for item in items:
        if item.get_closest_marker("triton") and _on_gpu():
            item.add_marker("gpu")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a kernel test in the child process of its file, if there is no GPU."""
    if not pyfuncitem.get_closest_marker("triton") or _PIPE in os.environ or _on_gpu():
        return None
    config, path = pyfuncitem.config, pyfuncitem.path
    children = config.stash[_children]
    if path not in children:
        children[path] = _Child(path, config.rootpath)
    try:
        outcome, reason = children[path].run(pyfuncitem.nodeid)
    except BaseException:  # also a timeout, which pytest-timeout raises as a failure
        children.pop(path).close()  # a later test would read this test's report
        raise
    if outcome == "skipped":
        pytest.skip(reason)
    if outcome != "passed":
        pytest.fail(reason, pytrace=False)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    for child in config.stash.get(_children, {}).values():
        child.close()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In a child process, run the tests whose ids arrive on standard input; report each outcome."""
    if _PIPE not in os.environ:
        return None
    items = {item.nodeid: item for item in session.items}
    collector = _Collector()
    session.config.pluginmanager.register(collector)
    with os.fdopen(int(os.environ[_PIPE]), "w") as reports:
        for line in sys.stdin:
            collector.outcome = ["passed", ""]
            item = items.get(line.strip())
            if item is None:
                collector.outcome = ["failed", f"the child did not collect {line.strip()}"]
            else:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            reports.write(json.dumps(collector.outcome) + "\n")
            reports.flush()
    return True


class _Collector:
    """Records the outcome of the current test ("passed", "failed" or "skipped") and its reason."""

    outcome: list[str]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed and self.outcome[0] != "failed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.outcome = [report.outcome, reason or report.longreprtext]


def _on_gpu() -> bool:
    import torch  # slow to import, so only on demand

    return torch.cuda.is_available()
