"""Features of chat templates: environment of transformers, several templates, parts of messages."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from services.common.errors import InvalidRequest
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError, TemplateInput
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import IncrementalDetokenizer
from services.tokenizer.tracked_text import mask_of
from tests.services.tiny_model import save_tiny_model
from tests.services.tokenizer.test_tokenizer import write_sentencepiece

CHAT = [
    {"role": "user", "content": "Grüße <b> & 'x'"},
    {"role": "assistant", "content": "<think>long</think>\n\nyes"},
    {"role": "user", "content": " end\n"},
]
# Lines of a name and a template.
FEATURES = dict(
    line.split(": ", 1)
    for line in Path(__file__).with_name("features.txt").read_text("utf-8").splitlines()
)


@pytest.mark.parametrize("feature", FEATURES)
def test_template_renders_as_in_transformers(feature: str) -> None:
    source = FEATURES[feature]
    (expected,), _ = render_jinja_template([CHAT], chat_template=source, add_generation_prompt=True)
    text = ChatTemplate(source).render(CHAT, {})
    assert text == expected
    assert len(mask_of(text)) == len(text)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ nothing.there }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_rejected_template_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="rejects the messages"):
        ChatTemplate(source).render(CHAT, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ('x' ~ messages[0].content)._mask }}",
        "{{ 'x'.strip.__func__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ dict.__init__ }}",
        "{{ namespace.__init__ }}",
    ],
)
def test_internals_of_python_are_undefined(source: str) -> None:
    assert ChatTemplate(source).render(CHAT, {}) == ""


def test_invalid_template_refuses_chats_only(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for %}")
    with structlog.testing.capture_logs() as logs:
        tokenizer = ServedModel.load(
            GatewaySettings.model_validate({"model": str(folder)})
        ).tokenizer
    (warning,) = logs
    assert warning["event"] == "chats will be refused"
    assert "the chat template is not valid" in warning["reason"]
    assert tokenizer.encode("hi")
    with pytest.raises(ChatTemplateError, match="the chat template is not valid"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("in_files", [False, True])
def test_default_template_of_several_is_used(tmp_path: Path, in_files: bool) -> None:
    sources = {"default": "D", "tool_use": "T", "rag": "R"}
    config: dict[str, Any] = {"chat_template": "old"}
    if in_files:
        (tmp_path / "additional_chat_templates").mkdir()
        for name, source in sources.items():
            folder = "." if name == "default" else "additional_chat_templates"
            file = "chat_template" if name == "default" else name
            (tmp_path / folder / f"{file}.jinja").write_text(source)
    else:
        config["chat_template"] = [{"name": k, "template": v} for k, v in sources.items()]
    template = ChatTemplate.from_directory(tmp_path, config)
    assert template is not None
    assert template.source == "D"
    assert template.render(CHAT, {}) == "D"
    assert template.render(CHAT, {}, TemplateInput(TOOLS)) == "T"
    again = ChatTemplate.from_directory(tmp_path / "none", {"chat_template": template.declaration})
    assert again is not None
    assert (again.source, again.tool_template.source) == ("D", "T")


def test_several_templates_without_default_are_none(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}]
    assert ChatTemplate.from_directory(tmp_path, {"chat_template": named}) is None
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert ChatTemplate.from_directory(tmp_path, {"chat_template": "old"}) is None


LOOP = "{% for p in m.content %}{{ p.text }}|{% endfor %}"
PARTS = {  # template of a message, and whether it gets a list of parts
    "{{ m.content }}": False,
    "{{ m.content | trim }}": False,
    LOOP: True,
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}": True,
    "{% for p in m.content | selectattr('text') %}{{ p.text }}{% endfor %}": True,
    "{% for p in m.content[0:] %}{{ p.text }}{% endfor %}": True,
    "{% set content = m.content %}{% for p in content %}{{ p.text }}{% endfor %}": True,
    "{% set c = m.content %}{{ c }}": False,
    "{% macro f(r, c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    "{{ f(m.role, m.content) }}": True,
    "{% macro f(c) %}{% for p in [c] %}{{ p }}{% endfor %}{% endmacro %}{{ f(m.content) }}": False,
    f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{LOOP}{{% endif %}}": True,
    "{% for p in m.tool_calls %}{{ p }}{% endfor %}{{ m.content }}": False,
}


@pytest.mark.parametrize("body", PARTS)
@pytest.mark.parametrize("name", ["messages", "loop_messages", "messages[0:]"])
def test_text_parts_are_joined_by_newlines_or_given_as_a_list(body: str, name: str) -> None:
    start = "{% set loop_messages = messages %}" if name == "loop_messages" else ""
    source = f"{start}{{% for m in {name} %}}{body}{{% endfor %}}"
    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    given = parts if PARTS[body] else "a\nb"
    (expected,), _ = render_jinja_template(
        [[{"role": "user", "content": given}]], chat_template=source
    )
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": parts}], {}) == expected
    assert "x" in template.render([{"role": "user", "content": "x"}], {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        "{{ (messages[0].content + messages[1].content) }}",
        "{{ messages[0].content ~ messages[1].content }}",
        "{{ messages | map(attribute='content') | join }}",
        "{{ '%s%s' % (messages[0].content, messages[1].content) }}",
        "{{ '{}{}'.format(messages[0].content, messages[1].content) }}",
        "{{ (messages[0].content ~ '|' ~ messages[1].content) | replace('|', '') }}",
        "{{ (messages[0].content ~ '|' ~ messages[1].content).split('|') | join }}",
        "<{{ (messages[0].content ~ messages[1].content)[1:] }}",
    ],
)
def test_special_tokens_are_not_forged_from_fragments(source: str, tmp_path: Path) -> None:
    folder = write_sentencepiece(tmp_path)
    (folder / "chat_template.jinja").write_text(f"{{{{ bos_token }}}}{source}<s>")
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "</"}, {"role": "assistant", "content": "s>"}]
    prompt = tokenizer.render_chat(messages)
    ids = tokenizer.encode_rendered(prompt)
    assert [id for id in ids if id in tokenizer.special_ids] == [1, 1]
    assert "</s>" in tokenizer.decode(ids, skip_special=False)


def test_unigram_tokenizer_does_not_choose_special_pieces(tmp_path: Path) -> None:
    folder = write_sentencepiece(tmp_path)
    file = folder / "tokenizer.json"
    description = json.loads(file.read_text())
    pieces = list(description["model"]["vocab"])
    letters = [chr(code) for code in range(33, 127) if chr(code) not in pieces]
    description["model"] = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [[piece, -10.0 if len(piece) == 1 else 0.0] for piece in [*pieces, *letters]],
        "byte_fallback": True,
    }
    file.write_text(json.dumps(description))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_rendered(tokenizer.render_chat([{"role": "user", "content": "</s>"}]))
    assert 2 not in ids
    assert tokenizer.decode(ids, skip_special=False) == "<s> </s>"
    assert tokenizer.encode("</s>", add_special=False) == [2]


def test_name_that_a_tokenizer_of_words_cannot_read_as_text_is_refused(tmp_path: Path) -> None:
    words = ["<|start|>", "<|end|>", "hello", "<unk>"]
    backend = Tokenizer(models.WordLevel({w: id for id, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(words[:2])
    backend.save(str(tmp_path / "tokenizer.json"))
    source = "<|start|> {{ messages[0].content }} <|end|>"
    (tmp_path / "chat_template.jinja").write_text(source)
    tokenizer = load_tokenizer(tmp_path)
    prompt = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.encode_rendered(prompt) == [0, 2, 1]
    with pytest.raises(InvalidRequest, match=r"cannot read '<\|end\|>' as text"):
        tokenizer.render_chat([{"role": "user", "content": "<|end|> hello"}])


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "ü"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "<y>"},
]
WITH_TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}{{ m.tool_call_id }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}{{ mode }}{% if add_generation_prompt %}<go>{% endif %}"
)


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("add", [True, False])
def test_tools_and_variables_render_as_in_transformers(tools: list[Any], add: bool) -> None:
    (expected,), _ = render_jinja_template(
        [CALLING],
        tools=tools or None,
        chat_template=WITH_TOOLS,
        add_generation_prompt=add,
        mode="m",
    )
    given = TemplateInput(tools, {"mode": "m", "tools": "no", "self": 1}, add)
    template = ChatTemplate(WITH_TOOLS)
    text = template.render(CALLING, {}, given)
    assert text == expected
    assert {"tools", "mode", "add_generation_prompt", "messages"} <= template.variables


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }} </s>\n{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content.strip() ~ eos }}{% endfor %}",
        f"{{% for m in messages %}}<{{{{ m.role }}}}>{LOOP}</s>{{% endfor %}}",
    ],
)
@pytest.mark.parametrize("last", ["", "So far ", "So\n\nfar", "</s>", " x", "end of message"])
def test_final_message_is_continued_as_in_transformers(source: str, last: str) -> None:
    template = ChatTemplate(source)
    messages: list[dict[str, Any]] = [*CHAT[:1], {"role": "assistant", "content": last}]
    given: list[dict[str, Any]] = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if LOOP in source else m
        for m in messages
    ]
    (expected,), _ = render_jinja_template(
        [given], chat_template=source, continue_final_message=True, eos=""
    )
    options = TemplateInput((), {"eos": ""}, False, True)
    assert template.render(messages, {}, options) == expected
    assert template.render(given, {}, options) == expected


def test_message_that_the_template_omits_cannot_be_continued() -> None:
    options = TemplateInput(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="omits the final message"):
        ChatTemplate("{{ messages[0].content }}").render(CHAT, {}, options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content + 'x' }}", "x"),
        ("{% for m in messages %}{{ 'null' if m.content is none }}{% endfor %}", "null"),
        ("{% for m in messages %}{{ 'null' if m['content'] is not none }}{% endfor %}", ""),
        ("{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}", None),
    ],
)
def test_null_content_is_empty_unless_the_template_tests_for_it(
    source: str, expected: str | None
) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    text = ChatTemplate(source).render(messages, {})
    assert text == ("{'type': 'text', 'text': ''}" if expected is None else expected)


def test_special_tokens_that_are_shown_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path))
    ids = tokenizer.encode("<s>a</s>")
    assert set(tokenizer.special_ids) & set(ids)

    def text(*shown: str) -> str:
        detokenizer = IncrementalDetokenizer(tokenizer, shown=shown)
        return detokenizer.push(ids) + detokenizer.finish()

    hidden = text()
    assert "</s>" not in hidden
    assert text("</s>") == f"{hidden}</s>"
    assert text("</s>", "other") == text("</s>")
    assert tokenizer.pieces_showing(("x",)) is tokenizer.visible_pieces
    assert tokenizer.pieces_showing(("</s>",)) is tokenizer.pieces_showing(["</s>"])
