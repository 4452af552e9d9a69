"""The examples of CLIENTS.md run as they are written, with the deployment's address."""

import re
from pathlib import Path

import pytest

from tests.clients.client import output_of, variables_of
from tests.clients.environments import python_of
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

_PAGE = Path(__file__).parents[2] / "services" / "gateway" / "CLIENTS.md"
_CODE = re.compile(r"```python\n(.*?)```", re.S)
_ENVIRONMENTS = {
    "openai": "openai",
    "anthropic": "anthropic",
    "LangChain": "langchain",
    "LangChain retriever": "langchain",
    "LlamaIndex retriever": "llama-index",
    "Haystack": "haystack",
    "LlamaIndex": "llama-index",
    "LiteLLM": "litellm",
    "instructor": "instructor",
    "pydantic-ai": "pydantic-ai",
}
_CI = ("openai", "anthropic", "LangChain", "LangChain retriever")
_ADDRESS = "http://127.0.0.1:8000"


def _examples() -> dict[str, str]:
    """Return the Python code of each section, by its title."""
    sections = _PAGE.read_text().split("\n### ")[1:]
    titled = ((section.partition("\n")[0], _CODE.search(section)) for section in sections)
    return {title: code[1] for title, code in titled if code is not None}


EXAMPLES = _examples()


def test_every_client_has_an_example() -> None:
    assert set(EXAMPLES) == set(_ENVIRONMENTS)
    assert all(_ADDRESS in code for code in EXAMPLES.values())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _CI else pytest.mark.more_clients)
        for name in _ENVIRONMENTS
    ],
)
def test_example_prints_an_answer(running: Running, name: str) -> None:
    code = EXAMPLES[name].replace(_ADDRESS, running.url)
    command = [str(python_of(_ENVIRONMENTS[name])), "-c", code]
    assert output_of(command, variables_of(running), 240).strip()
