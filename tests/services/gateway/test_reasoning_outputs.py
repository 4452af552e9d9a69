"""Reasoning in responses, whole and streamed."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.chat_models import (
    END,
    assembled,
    choices_of,
    events_of,
    family_model,
    speak,
)
from tests.services.gateway.conftest import Site, gateway_site
from tests.services.gateway.fakes import LENGTH

openai = pytest.importorskip("openai")

USER = {"role": "user", "content": "Why?"}
BODY: dict[str, Any] = {"messages": [USER]}


@pytest.fixture
async def family(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    name, settings = request.param
    async with gateway_site(family_model(tmp_path, name), 1, None, settings) as site:
        yield site


Family = tuple[str, dict[str, Any]]
QWEN: Family = ("qwen-3", {})
R1: Family = ("deepseek-r1", {})
# The model writes its tags as text, because its template does not name them.
NONE, NAMED = ("hermes", {"tool_parser": "none"}), ("hermes", {"reasoning_parser": "think"})


def message(content: str | None, reasoning: str = "") -> dict[str, Any]:
    fields = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("family", "output", "expected"),
    [
        (QWEN, "<think>\nAs é.\n</think>\n\nSo.", message("\n\nSo.", "\nAs é.\n")),
        (QWEN, "So.", message("So.")),
        (R1, "As é.\n</think>So.", message("So.", "As é.\n")),
        (R1, "<think>As</think>So.", message("So.", "As")),
        (R1, "As", message(None, "As")),
        (NAMED, "<think>As</think>So.", message("So.", "As")),
        (NONE, "<think>As</think>So.", message("AsSo.")),
    ],
    indirect=["family"],
)
@pytest.mark.parametrize("size", [1, 1000])
async def test_reasoning_is_a_field_of_the_message(
    family: Site, output: str, expected: dict[str, Any], size: int
) -> None:
    family.worker.script = speak(family, output + END, size=size)
    (choice,) = await choices_of(family, BODY)
    assert choice["message"] == expected
    assert choice["finish_reason"] == "stop"
    assert assembled(await events_of(family, BODY)) == [choice]


@pytest.mark.parametrize("family", [R1], indirect=True)
async def test_output_that_is_cut_in_the_block(family: Site) -> None:
    family.worker.script = speak(family, "As é", end=LENGTH)
    (choice,) = await choices_of(family, BODY)
    assert (choice["message"], choice["finish_reason"]) == (message(None, "As é"), "length")


@pytest.mark.parametrize("family", [R1], indirect=True)
@pytest.mark.parametrize(
    ("side", "expected"), [("left", message(None, "As")), ("right", message("As"))]
)
async def test_block_begins_in_the_prompt_only_if_its_end_is_kept(
    family: Site, side: str, expected: dict[str, Any]
) -> None:
    family.worker.script = speak(family, "As" + END)
    cut = {"truncate_prompt_tokens": 3, "truncation_side": side}
    (choice,) = await choices_of(family, {**BODY, **cut})
    assert choice["message"] == expected


@pytest.mark.parametrize("family", [R1], indirect=True)
async def test_reasoning_is_left_out_but_counted(family: Site) -> None:
    output = "As.</think>So." + END
    family.worker.script = speak(family, output)
    body = {**BODY, "include_reasoning": False}
    answer = (await family.http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"] == message("So.")
    assert answer["usage"]["completion_tokens"] == len(family.encode(output))
    assert assembled(await events_of(family, body))[0]["message"] == message("So.")


@pytest.mark.parametrize("family", [QWEN], indirect=True)
@pytest.mark.parametrize(
    ("begun", "output", "expected"),
    [
        ("<think>As", " é.</think>So.", message("So.", " é.")),
        ("<think>As</think>So", " it is.", message(" it is.")),
        ("So", " it is.", message(" it is.")),
    ],
)
async def test_message_is_continued_in_or_after_its_block(
    family: Site, begun: str, output: str, expected: dict[str, Any]
) -> None:
    family.worker.script = speak(family, output + END)
    messages = [USER, {"role": "assistant", "content": begun}]
    (choice,) = await choices_of(family, {"messages": messages, "continue_final_message": True})
    assert choice["message"] == expected


@pytest.mark.parametrize("family", [QWEN], indirect=True)
async def test_client_of_openai_reads_reasoning(family: Site) -> None:
    family.worker.script = speak(family, "<think>As é.</think>So." + END)
    async with openai.AsyncOpenAI(base_url=f"{family.url}/v1", api_key="none") as client:
        arguments: Any = {"model": family.model.name, "messages": [USER]}
        answer = await client.chat.completions.create(**arguments)
        assert answer.choices[0].message.reasoning_content == "As é."
        assert answer.choices[0].message.content == "So."
        read = ""
        async for chunk in await client.chat.completions.create(**arguments, stream=True):
            read += getattr(chunk.choices[0].delta, "reasoning", "")
        assert read == "As é."
