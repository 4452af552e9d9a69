"""Reasoning blocks at the start of outputs."""

from pathlib import Path

import pytest

from services.gateway.output.formats import MessageFormats
from services.gateway.output.reasoning import MISTRAL, THINK
from services.tokenizer.chat_template import ChatTemplate
from tests.services.gateway.output.samples import Parsed, call, parse, parser

TEMPLATES = Path(__file__).parents[2] / "tokenizer/templates"


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "\nHm.\n", "\n\nYes."),
        ("\n<think>Hm.</think>Yes.", False, "Hm.", "Yes."),
        ("Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("<think>\nHm.</think>Yes.", True, "\nHm.", "Yes."),
        ("\n\n</think>\n\nYes.", True, "\n\n", "\n\nYes."),
        ("Hm", True, "Hm", ""),
        ("<think>Hm</thi", False, "Hm</thi", ""),
        ("<thin", False, "", "<thin"),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("Hm.</think>Yes.", False, "", "Hm.</think>Yes."),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think></think>Yes.", False, "", "Yes."),
        ("", True, "", ""),
        ("<think>", False, "", ""),
    ],
)
def test_block_is_separated(text: str, is_open: bool, reasoning: str, content: str) -> None:
    message = parse(parser(None, "think", is_open=is_open), [text])
    assert message == Parsed(content, reasoning, finish="stop")


def test_calls_are_parsed_after_the_block_only() -> None:
    called = '<tool_call>{"name": "f"}</tool_call>'
    message = parse(parser("hermes", "think"), [f"<think>{called}</think>\n\n{called}"])
    assert message == Parsed("", called, [call()], "tool_calls")


def test_call_at_the_start_of_a_bare_format_follows_the_block() -> None:
    message = parse(parser("llama3", "think"), ['<think>x</think>\n{"name": "f"}'])
    assert message == Parsed("", "x", [call()], "tool_calls")


def test_reasoning_can_be_left_out() -> None:
    message = parse(parser(None, "think", include_reasoning=False), ["<think>a</think>b"])
    assert message == Parsed("b", "", finish="stop")


def test_mistral_has_other_tags() -> None:
    message = parse(parser("mistral", "mistral"), ["[THINK]a[/THINK][TOOL_CALLS]f{}"])
    assert message == Parsed("", "a", [call()], "tool_calls")


def test_prompt_and_continued_message_may_end_in_a_block() -> None:
    assert THINK.is_open("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.is_open("<|im_start|>assistant\n")
    assert THINK.is_unclosed("<think>so far")
    assert not THINK.is_unclosed("<think>so</think> far")
    assert not THINK.is_unclosed("so far")


@pytest.mark.parametrize(
    ("template", "expected"),
    [("qwen-3", THINK), ("qwq", THINK), ("deepseek-r1", THINK), ("smollm-2", None)],
)
def test_format_is_chosen_by_the_template(template: str, expected: object) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    assert MessageFormats.of(ChatTemplate(source)).reasoning is expected
    assert MessageFormats.of(ChatTemplate(source), reasoning="none").reasoning is None
    assert MessageFormats.of(ChatTemplate(source), reasoning="mistral").reasoning is MISTRAL
