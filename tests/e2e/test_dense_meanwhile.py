"""`headrace up --keep --dense-meanwhile`: the dense model is served until the next start."""

import time
from pathlib import Path

import httpx
import pytest

from tests.harness.deployment import Running, deployed
from tests.services.tiny_model import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

LIMIT_S = 600.0  # seconds; `headrace prepare` runs at low priority


def ask(running: Running) -> int:
    body = {"model": running.model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60, trust_env=False)
    return int(answer.raise_for_status().json()["usage"]["completion_tokens"])


def wait_for_factorization(cache: Path, log: Path) -> None:
    """Wait until the checkpoint and the codebooks for it are sealed."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if any(
            list(folder.glob("codebooks-*.seal"))
            for folder in (cache / "artifacts").iterdir()
            if (folder / "checkpoint.seal").exists()
        ):
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def test_first_start_serves_the_dense_model_and_the_next_one_the_factorized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path / "model")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    flags = ("--model", str(model), "--keep", "0.6", "--dense-meanwhile")
    with deployed(*flags) as running:
        dense = running.model
        assert "keep" not in dense
        wait_for_factorization(tmp_path, running.logs / "prepare.log")
        assert ask(running) == 4
    with deployed(*flags) as running:
        assert running.model == f"{dense}-keep0.6"
        assert ask(running) == 4
