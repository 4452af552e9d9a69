"""Packages for Node.js: OpenAI's, and the AI SDK of Vercel."""

import shutil

import pytest

from tests.clients.client import NodeClient
from tests.harness.deployment import Running

pytestmark = [
    pytest.mark.clients,
    pytest.mark.more_clients,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(shutil.which("npm") is None, reason="Node.js and npm are not installed"),
]

OPENAI = NodeClient("with_openai")
AI_SDK = NodeClient("with_ai_sdk")
ANNA = {"name": "Anna", "age": 7}


@pytest.mark.parametrize(
    ("client", "function"), [(OPENAI, "chat"), (AI_SDK, "chat"), (AI_SDK, "openai_chat")]
)
def test_chat_is_the_same_whole_and_streamed(
    running: Running, client: NodeClient, function: str
) -> None:
    found = client.call(running, function)
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]


@pytest.mark.parametrize(("client", "function"), [(OPENAI, "parse"), (AI_SDK, "structured")])
def test_output_follows_a_schema(running: Running, client: NodeClient, function: str) -> None:
    assert client.call(running, function).items() >= ANNA.items()


@pytest.mark.parametrize("client", [OPENAI, AI_SDK])
def test_tool_is_called(running: Running, client: NodeClient) -> None:
    found = client.call(running, "tools")
    assert "sunny" in found["answer"].lower()
    assert found.get("calls", [{"city": "Paris"}]) == [{"city": "Paris"}]


def test_errors_have_the_types_of_openai(running: Running) -> None:
    assert OPENAI.call(running, "errors") == ["NotFoundError", "model_not_found", "model"]


@pytest.mark.parametrize("client", [OPENAI, AI_SDK])
def test_responses_are_the_same_whole_and_streamed(running: Running, client: NodeClient) -> None:
    found = client.call(running, "responses")
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]


def test_embeddings_find_documents(running: Running) -> None:
    found = OPENAI.call(running, "retrieval")
    assert found["best"] == 1
    assert found["difference"] < 1e-8
    assert found["dimensions"] == [384, 64]
    assert AI_SDK.call(running, "retrieval") == {"compatible": 1, "openai": 1}
