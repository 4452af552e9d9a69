"""The first `headrace up` after installation, with empty caches, compiles and answers."""

from pathlib import Path

import httpx
import pytest

from tests.harness.deployment import deployed

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


def test_first_start_with_empty_caches_compiles_and_answers(
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
    assert "Paris" in answer.raise_for_status().json()["choices"][0]["message"]["content"]
    assert list((tmp_path / "numba").rglob("*.nbc")), "the loops were not compiled here"
