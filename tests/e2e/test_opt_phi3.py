"""OPT and Phi-3 with random weights, served over HTTP and compressed by `headrace`."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.test_kv_format_plugin import byte_tokenizer
from tests.harness.deployment import Running, deployed
from tests.programs.equality import Case, ask_all
from tests.runtime.checkpoint.samples import LONGROPE, opt, phi3, save_with_noise
from tests.runtime.tiny import prompt_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

VOCAB, CONTEXT, OUTPUT = 256, 1024, 16
LENGTHS = (65, 100, 333)
"""Tokens of the prompts, which exceed the original context of the Phi-3 model."""
FACTS = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": 0}
MODELS: dict[str, Callable[[], Any]] = {
    "opt": lambda: opt(**FACTS),
    "phi3": lambda: phi3(
        **FACTS, rope_parameters=dict(LONGROPE), original_max_position_embeddings=64
    ),
}
LOGIT_ERROR = 0.02
"""Difference of logits below which another token may be chosen: KV is rounded to bf16."""


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    folder = tmp_path_factory.mktemp("families") / str(request.param)
    torch.manual_seed(1)
    save_with_noise(MODELS[request.param](), folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    for role in ("PREFILL", "DECODE"):
        monkeypatch.setenv(f"HEADRACE_{role}_KV_TOKENS", "2048")
        monkeypatch.setenv(f"HEADRACE_{role}_LOG_FORMAT", "json")


def complete(running: Running, prompt: object) -> dict[str, Any]:
    body = {"model": running.model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
    answer = httpx.post(
        f"{running.url}/v1/completions",
        json=body | {"ignore_eos": True},
        timeout=60,
        trust_env=False,
    )
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.mark.long
def test_deployment_generates_the_tokens_of_transformers(folder: Path) -> None:
    cases = [Case(str(n), prompt_of(n, vocab=VOCAB), 0.0, 0, OUTPUT) for n in LENGTHS]
    with deployed("--model", str(folder), "--device", "cpu", "--codec", "raw") as running:
        found = asyncio.run(ask_all(running, cases))
        texts = {case.name: complete(running, list(case.prompt)) for case in cases}
        assert complete(running, "Once upon a time")["usage"]["completion_tokens"] == OUTPUT
    peer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = byte_tokenizer()
    for case in cases:
        tokens = list(found[case.name].tokens)
        assert texts[case.name]["choices"][0]["text"] == tokenizer.decode(tokens)
        with torch.inference_mode():
            logits = peer(torch.tensor([[*case.prompt, *tokens]])).logits[0]
        logits = logits[len(case.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < LOGIT_ERROR


@pytest.mark.long
def test_compressed_model_is_served(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    command = [
        *(sys.executable, "-m", "services.cli", "compress", "--model", str(folder)),
        *("--out", str(made), "--keep", "0.7", "--rows", "2", "--device", "cpu"),
        *("--chats", "0", "--held-out-chats", "0"),
    ]
    subprocess.run(command, check=True, timeout=600)
    with deployed("--model", str(made), "--device", "cpu", "--codec", "raw") as running:
        assert complete(running, "Once upon a time")["usage"]["completion_tokens"] == OUTPUT
