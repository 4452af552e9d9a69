"""LiteLLM: its package and its proxy."""

import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.client import ENCODER, Client, variables_of
from tests.clients.environments import python_of
from tests.harness.deployment import Running
from tests.ports import free_ports

pytestmark = [pytest.mark.clients, pytest.mark.more_clients, pytest.mark.timeout(2400)]

LITELLM = Client("litellm", "with_litellm")
_CONFIG = """
model_list:
  - model_name: small
    litellm_params:
      model: hosted_vllm/{model}
      api_base: {url}/v1
      api_key: unused
  - model_name: embedder
    litellm_params:
      model: hosted_vllm/{encoder}
      api_base: {url}/v1
      api_key: unused
  - model_name: reranker
    litellm_params:
      model: hosted_vllm/{encoder}
      api_base: {url}/v1
      api_key: unused
general_settings:
  master_key: {key}
"""
_KEY = f"sk-{secrets.token_hex(16)}"
_START_S = 240.0


def test_chats_are_the_same_whole_and_streamed(running: Running) -> None:
    found = LITELLM.call(running, "chat")
    assert set(found) == {"hosted_vllm", "openai"}
    for answer in found.values():
        assert "Paris" in answer["text"]
        assert answer["streamed"] == answer["text"]


def test_output_follows_a_schema(running: Running) -> None:
    assert LITELLM.call(running, "structured").items() >= {"name": "Anna", "age": 7}.items()


def test_errors_have_the_types_of_litellm(running: Running) -> None:
    assert LITELLM.call(running, "errors") == ["NotFoundError", "ContextWindowExceededError"]


@pytest.fixture(scope="module")
def proxy(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run LiteLLM's proxy for the deployment, and return its address."""
    folder = tmp_path_factory.mktemp("proxy")
    (folder / "config.yaml").write_text(
        _CONFIG.format(model=running.model, encoder=ENCODER, url=running.url, key=_KEY)
    )
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = python_of("litellm").with_name("litellm")
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [str(command), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env=variables_of(running),
            stdout=log,
            stderr=log,
        )
        try:
            _wait_until_alive(process, url, folder / "log")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_alive(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health/liveliness", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"the proxy did not start: {log.read_text()[-4000:]}")


def test_proxy_forwards_chats(running: Running, proxy: str) -> None:
    found = LITELLM.call(running, "proxied", HEADRACE_PROXY=proxy, HEADRACE_PROXY_KEY=_KEY)
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]


def test_texts_are_embedded_with_every_provider(running: Running) -> None:
    found = LITELLM.call(running, "embeddings")
    assert set(found) == {"hosted_vllm", "openai", "infinity", "jina_ai"}
    assert all(shape == [5, 384] for shape in found.values())


def test_documents_are_ranked_with_every_provider(running: Running) -> None:
    found = LITELLM.call(running, "rerank")
    assert set(found) == {"hosted_vllm", "cohere", "jina_ai", "infinity"}
    for ranked in found.values():
        assert len(ranked) == 5
        assert all(names[0] == name and len(names) == 2 for name, names in ranked.items())


def test_proxy_forwards_embeddings_and_ranks(running: Running, proxy: str) -> None:
    found = LITELLM.call(
        running, "proxied_embeddings", HEADRACE_PROXY=proxy, HEADRACE_PROXY_KEY=_KEY
    )
    assert found == {"dimensions": [384] * 5, "best": "moon"}
