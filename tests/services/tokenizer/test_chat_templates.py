"""Chat templates of many models: the text and the ids of transformers, and no forged tokens.

The templates in ``templates/`` follow the documented formats of the models. Their first line names
the special tokens.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer as OurTokenizer
from services.tokenizer.tracked_text import mask_of

FOLDER = Path(__file__).with_name("templates")
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
REASONING = "<think>\nFirst, <b>this</b>.\n</think>\n\nThe answer."


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": content}
        for n, content in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


CHATS = [
    chat("hi"),
    chat("Hello!", system="Be brief."),
    chat("What is 2+2?", "4", "And 3+3?"),
    chat(
        "Grüße 日本語", "😀👩\u200d👧 <b>", "e\u0301 | a < b", "[ok]", "x", system="naïve ▁ \u00a0"
    ),
    chat(" \n padded\t", "\nanswer\n ", "  "),
    chat("", "", ""),
    chat("Think.", REASONING, "Again."),
    chat("Think.", REASONING, system="Reason. /no_think"),
    chat("{{ 7 * 7 }} {% raw %}", "%s {} {0} %%", "\\n '\" \x00"),
    chat("<tool_response>x</tool_response>", "yes\r\n\r\nno", "end"),
]


@cache
def source_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def tokens_of(name: str) -> tuple[dict[str, str], list[str]]:
    """Return the special tokens that have a name in the template, and all of them."""
    found = re.match(r"\{#- bos: (\S*) eos: (\S*) special: (.*) -#\}", source_of(name))
    assert found
    named = {"bos_token": found[1], "eos_token": found[2]}
    return {key: token for key, token in named.items() if token}, found[3].split()


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    """Return the folder of a tokenizer of bytes, with the special tokens of a template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    named, special = tokens_of(name)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=source_of(name), **named
    ).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> OurTokenizer:
    return load_tokenizer(folder)


def expected(source: str, messages: list[dict[str, Any]], names: dict[str, str]) -> str | None:
    """Return the text of transformers, or None if the template rejects the messages."""
    try:
        (text,), _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=True, **names
        )
    except (jinja2.TemplateError, TypeError):
        return None
    return str(text)


def rendered(template: ChatTemplate, messages: Any, names: dict[str, str]) -> str | None:
    try:
        return template.render(messages, names)
    except ChatTemplateError:
        return None


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def test_text_is_that_of_transformers(name: str) -> None:
    template = ChatTemplate(source_of(name))
    names, special = tokens_of(name)
    forged = chat(*("".join(special[n:] + special[:n]) for n in range(3)), system=special[-1])
    accepted = 0
    for messages in [*CHATS, forged, [*forged[1:]]]:
        # LLaVA's template takes lists of parts alone.
        given = as_parts(messages) if name == "llava" else messages
        text = rendered(template, messages, names)
        assert text == expected(source_of(name), given, names), messages
        accepted += text is not None
    assert accepted >= 6


def test_ids_of_chats_without_special_tokens_are_those_of_transformers(
    name: str, folder: Path, tokenizer: OurTokenizer
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    _, special = tokens_of(name)
    for messages in CHATS:
        given = as_parts(messages) if name == "llava" else messages
        text = expected(source_of(name), given, tokens_of(name)[0])
        if text is None or any(token in str(messages) for token in special):
            continue
        ids = theirs.apply_chat_template(given, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode_rendered(tokenizer.render_chat(messages)) == ids, messages


def test_content_does_not_forge_special_tokens(name: str, tokenizer: OurTokenizer) -> None:
    names, special = tokens_of(name)

    def encoded(messages: list[dict[str, Any]]) -> list[int]:
        return tokenizer.encode_rendered(tokenizer.render_chat(messages))

    def of_template(messages: list[dict[str, Any]]) -> list[int]:
        return [id for id in encoded(messages) if id in tokenizer.special_ids]

    plain = of_template(chat("hi", "ho", "hi"))
    for token in special:
        for content in (
            token,
            f"{token}{token}",
            f"x{token}\n",
            f"{token[:2]}{token}",
            f" {token} ",
        ):
            messages = chat(content, "ho", content)
            assert of_template(messages) == plain, content
            given = as_parts(messages) if name == "llava" else messages
            text = expected(source_of(name), given, names)
            assert tokenizer.decode(encoded(messages), skip_special=False) == text


def test_all_special_tokens_of_a_template_are_its_own(name: str) -> None:
    names, special = tokens_of(name)
    text = rendered(ChatTemplate(source_of(name)), chat("x", "x", "x"), names)
    assert text is not None
    found = [m.span() for token in special for m in re.finditer(re.escape(token), text)]
    assert found or name in ("vicuna", "alpaca", "falcon", "olmo-2")
    assert all("0" not in mask_of(text)[start:end] for start, end in found)
