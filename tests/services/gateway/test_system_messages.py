"""System messages after the first, for templates that do not take them."""

from typing import Any

import pytest

from services.gateway.system_messages import fold_system_messages, takes_later_system
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
    assert fold_system_messages(given) == expected
    assert given == before, "the messages of the client are not changed"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("chatml", True), ("qwen-3", True), ("llama-3.1", True), ("smollm-3", False)],
)
def test_templates_that_take_later_system_messages(name: str, expected: bool) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    assert takes_later_system(ChatTemplate(source), {"bos_token": "<s>"}) is expected
