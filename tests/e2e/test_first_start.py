"""The first `headrace up` after installation, with empty caches, uses little CPU time."""

from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.deployment import deployed

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

CPU_S = 180.0
"""A minute and a half of two cores, in seconds: three times the CPU time on an idle machine.

Time on the clock would depend on what else is running.
"""


def used_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including those that have ended."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


def test_first_answer_takes_less_than_90_s_of_two_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "headrace"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    with deployed() as running:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": running.model, "messages": question, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(
            f"{running.url}/v1/chat/completions", json=body, timeout=60, trust_env=False
        )
        used = used_cpu_s(running.state.supervisor_pid)
    assert "Paris" in answer.raise_for_status().json()["choices"][0]["message"]["content"]
    assert list((tmp_path / "numba").rglob("*.nbc")), "the loops were not compiled here"
    assert used < CPU_S
