"""Conversations of which chat templates omit nothing."""

from typing import Any

import pytest

from services.gateway.conversation_fit import ConversationFit
from services.tokenizer.chat_template import ChatTemplate
from tests.services.tokenizer.test_chat_templates import FOLDER


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


S1, S2, S3 = (message("system", text) for text in ("one", "two", "three"))
U, A, T = message("user", "u"), message("assistant", "a"), message("tool", "t")
PARTS = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([S1, U, A], [S1, U, A]),
        ([S1, S2, U], [message("system", "one\n\ntwo"), U]),
        ([U, S1, A], [message("user", "u\n\n<system>\none\n</system>"), A]),
        (
            [S1, U, A, S2, U],
            [S1, U, A, message("user", "<system>\ntwo\n</system>\n\nu")],
        ),
        (
            [U, A, T, S2, S3, A],
            [
                *(U, A),
                message("tool", "t\n\n<system>\ntwo\n</system>\n\n<system>\nthree\n</system>"),
                A,
            ],
        ),
        (
            [U, A, S2, S3, U],
            [
                *(U, A),
                message("user", "<system>\ntwo\n</system>\n\n<system>\nthree\n</system>\n\nu"),
            ],
        ),
        ([U, A, S1, A], [U, A, message("user", "<system>\none\n</system>"), A]),
        ([message("system", PARTS), S2], [message("system", "x\ny\n\ntwo")]),
        (
            [message("user", PARTS), message("system", PARTS)],
            [message("user", "x\ny\n\n<system>\nx\ny\n</system>")],
        ),
        (
            [message("assistant", None), S1],
            [message("assistant", None), message("user", "<system>\none\n</system>")],
        ),
    ],
)
def test_later_system_messages_join_those_of_the_user(
    given: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    before = [dict(one) for one in given]
    assert ConversationFit(takes_later_system=False).apply(given) == expected
    assert given == before, "the messages of the client are not changed"


@pytest.mark.parametrize(
    ("name", "takes_later_system", "joined"),
    [
        ("chatml", True, set()),
        ("qwen-3", True, set()),
        ("llama-3.1", True, set()),
        ("glm-4.5", True, set()),
        ("smollm-3", False, set()),
        ("gemma-3", True, {"system"}),
        ("llama-3.2", True, {"system"}),
        ("mistral-v7", False, {"system", "assistant"}),
    ],
)
def test_prompts_have_all_of_the_conversation(
    name: str, takes_later_system: bool, joined: set[str]
) -> None:
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text())
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    fit = ConversationFit.of(template, names)
    assert fit == ConversationFit(takes_later_system, frozenset(joined))
    roles = ("system", "user", "assistant", "user", "system")
    texts = [f"text {n}" for n in range(10)]
    parts = [{"type": "text", "text": text} for text in texts]
    given = [message(role, parts[2 * at : 2 * at + 2]) for at, role in enumerate(roles)]
    prompt = template.render(fit.apply(given), names)
    assert [text for text in texts if text not in prompt] == []
