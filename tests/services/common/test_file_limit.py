"""The limit on open files, which the connections of a service need."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from services.common.file_limit import check_file_limit

SOFT = 256
_START = (
    "import resource, runpy, sys;"
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT}, {{hard}}));"
    "sys.argv = ['headrace', 'router', '--port', '0'];"
    "runpy.run_module('services.cli', run_name='__main__')"
)


@pytest.mark.slow
def test_service_raises_the_limit_on_open_files() -> None:
    hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    command = [sys.executable, "-c", _START.format(hard=hard)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        while "ready" not in (line := service.stderr.readline()):
            assert line, "the service has ended"
        limits = Path(f"/proc/{service.pid}/limits").read_text()
        service.terminate()
        service.stderr.read()
    found = re.search(r"Max open files +([0-9]+) +([0-9]+)", limits)
    assert found is not None
    assert found.groups() == (str(hard), str(hard))


def test_too_low_limit_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with structlog.testing.capture_logs() as logs:
        check_file_limit(500)
        assert logs == []
        check_file_limit(4096)
    assert [(entry["log_level"], entry["limit"]) for entry in logs] == [("warning", 1024)]
