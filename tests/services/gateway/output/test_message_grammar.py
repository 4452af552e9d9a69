"""Grammars of messages: each text that they allow is parsed to calls, reasoning and content."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest

from runtime.grammar.compiler import Grammar, compile_grammar
from runtime.grammar.masks import MaskWriter, allowed_tokens
from runtime.grammar.spec import GrammarBounds, GrammarKind, GrammarSpec
from runtime.grammar.vocabulary import GrammarVocabulary
from services.common.model_source import resolve_model
from services.gateway.output.call_parser import CallParser
from services.gateway.output.formats import TOOL_FORMATS
from services.gateway.output.lark import Marks
from services.gateway.output.message_grammar import CallableTool, CallGrammar, MessageGrammar
from services.gateway.output.message_parser import MessageParser
from services.gateway.output.reasoning import (
    MISTRAL,
    THINK,
    ReasoningFormat,
    ReasoningParser,
)
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer
from tests.runtime.grammar.validation import faults
from tests.services.gateway.chat_models import family_model
from tests.services.gateway.output.samples import Parsed, parse

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["°C", "</tool_call>", "<tool_call>"]}},
}
EMPTY = {"type": "object", "additionalProperties": False}
TOOLS = (CallableTool("get_weather", SCHEMA), CallableTool("f", EMPTY))
CALL = '{"name": "f", "arguments": { }}'
LLAMA_CALL = '{"name": "f", "parameters": {}}'
QWEN_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBâle <3\n\n</parameter>\n"
    "<parameter=days>\n[1, 20]\n</parameter>\n<parameter=unit>\n</tool_call>\n</parameter>\n"
    "</function>\n</tool_call>"
)
ANSWER = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
FORMATS = pytest.mark.parametrize("name", TOOL_FORMATS)
MODELS = pytest.mark.parametrize("model", ["marks are special tokens", "marks are text"])


@cache
def _models(folder: Path) -> dict[str, Tokenizer]:
    """Return tokenizers in which the marks are special tokens, and in which they are text."""
    return {
        "marks are special tokens": family_model(folder, "hermes").tokenizer,
        "marks are text": load_tokenizer(resolve_model("smollm2-135m")),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("family")


@pytest.fixture
def tokenizer(folder: Path, model: str) -> Tokenizer:
    return _models(folder)[model]


@cache
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer.json, tokenizer.vocab_size, tokenizer.eos_ids)


def compiled(grammar: MessageGrammar, tokenizer: Tokenizer) -> Grammar:
    spec = grammar.spec(Marks(tokenizer.special_tokens))
    return compile_grammar(spec, vocabulary(tokenizer), GrammarBounds())


def allows(grammar: MessageGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a grammar allows a text and the end after it, with and without marks."""
    found = compiled(grammar, tokenizer)
    for parse_special in (True, False):
        matcher = found.start()
        matcher.advance(tokenizer.encode(text, add_special=False, parse_special=parse_special))
        if not matcher.error and matcher.inner.is_accepting():
            return True
    return False


def generated(
    found: Grammar, tokenizer: Tokenizer, random: Random, begin: str = "", limit: int = 400
) -> str | None:
    """Return a text of random allowed tokens, after ``begin``; None if it is too long.

    Tokens with brackets, quotes and other ends are preferred, so that texts end.
    """
    matcher = found.start(tokenizer.encode(begin, add_special=False))
    tokens: list[int] = []
    ends = [
        token
        for text in ('"', "}", "]", "</tool_call>", "</think>", "[/THINK]", "\n")
        for token in tokenizer.encode(text, add_special=False)[:1]
    ]
    while len(tokens) < limit:
        words = MaskWriter(1).write([matcher], matcher.vocabulary.mask_words)
        among = allowed_tokens(words[0], 0, matcher.vocabulary.size).nonzero()[0].tolist()
        assert among, matcher.error
        stops = [token for token in tokenizer.eos_ids if token in among]
        if stops and random.random() < 0.7:
            return begin + _text(tokenizer, tokens)
        wanted = [token for token in ends if token in among and token not in stops]
        pool = wanted if wanted and random.random() < 0.6 else [t for t in among if t not in stops]
        if not pool:
            return begin + _text(tokenizer, tokens)
        token = random.choice(pool)
        tokens.append(token)
        matcher.advance([token])
    return None


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return b"".join(tokenizer.pieces[token] for token in tokens).decode()


def parser(grammar: MessageGrammar, name: str) -> MessageParser:
    reasoning = grammar.reasoning
    return MessageParser(
        ReasoningParser(reasoning, is_open=grammar.is_reasoning, gap=grammar.gap)
        if reasoning
        else None,
        CallParser(TOOL_FORMATS[name], {tool.name: tool.parameters for tool in TOOLS}),
    )


def calls(name: str, *, required: bool, parallel: bool = True) -> CallGrammar:
    return CallGrammar(TOOL_FORMATS[name], TOOLS, required=required, parallel=parallel)


def check_calls(message: Parsed, *, parallel: bool = True) -> None:
    assert message.calls
    assert len(message.calls) == 1 or parallel
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments, is_complete in message.calls:
        assert is_complete
        assert not faults(json.loads(arguments), dict(schemas[name]))
    assert message.finish == "tool_calls"


@pytest.mark.few(25)
@MODELS
@FORMATS
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("reasoning", "is_open", "begin"),
    [
        (None, False, ""),
        (THINK, True, "Why {}?</think>\n\n"),
        (THINK, False, "<think>Why?</think>\n\n"),
        (THINK, False, ""),
        (MISTRAL, True, "Why?[/THINK]"),
    ],
)
def test_required_calls_are_parsed(
    tokenizer: Tokenizer,
    name: str,
    parallel: bool,
    reasoning: ReasoningFormat | None,
    is_open: bool,
    begin: str,
) -> None:
    wanted = calls(name, required=True, parallel=parallel)
    grammar = MessageGrammar(reasoning, is_open, wanted, None)
    random, finished = Random(5), 0
    source = compiled(grammar, tokenizer)
    for _ in range(6):
        text = generated(source, tokenizer, random, begin)
        if text is not None:
            message = parse(parser(grammar, name), [text])
            check_calls(message, parallel=parallel)
            assert not message.content
            assert message.reasoning.startswith("Why") is bool(begin)
            finished += 1
    assert finished > 2


@MODELS
@FORMATS
@pytest.mark.parametrize("is_reasoning", [False, True])
def test_message_has_calls_or_the_constrained_content(
    tokenizer: Tokenizer, name: str, is_reasoning: bool
) -> None:
    grammar = MessageGrammar(THINK, is_reasoning, calls(name, required=False), ANSWER)
    random, source = Random(3), compiled(grammar, tokenizer)
    begin = "Why <tool_call>…</think>\n\n" if is_reasoning else ""
    if tokenizer.special_tokens.get("<tool_call>"):
        begin = begin.replace("<tool_call>", "")
    mark = TOOL_FORMATS[name].marker
    answers = called = 0
    for start in ("{", mark) * 4:
        text = generated(source, tokenizer, random, begin + start)
        if text is None:
            continue
        message = parse(parser(grammar, name), list(text))
        if start == mark:
            check_calls(message)
            called += 1
        else:
            assert not faults(json.loads(message.content), SCHEMA)
            assert message.content.startswith("{"), "without the gap"
            answers += 1
    assert answers
    assert called


@MODELS
@FORMATS
def test_content_is_free_without_a_required_call(tokenizer: Tokenizer, name: str) -> None:
    grammar = MessageGrammar(None, False, calls(name, required=False), None)
    format = TOOL_FORMATS[name]
    for text in ("", "Hi!", " \n<tool_cal {} [TOOL_CALL <|python_tag <think>", "é😀\n"):
        assert allows(grammar, tokenizer, text)
    marked = f"Hi {format.marker}"
    random, source = Random(1), compiled(grammar, tokenizer)
    texts = [generated(source, tokenizer, random, marked) for _ in range(4)]
    assert any(texts)
    for text in filter(None, texts):
        message = parse(parser(grammar, name), [text])
        check_calls(message)
        assert message.content == "Hi "
    assert not allows(grammar, tokenizer, f"{marked}no call")
    if format.bare:
        assert not allows(grammar, tokenizer, ' {"no": "call"}')
        assert allows(grammar, tokenizer, ' {"name": "f", "parameters": {}}')


@MODELS
def test_content_does_not_begin_with_the_tag_of_a_block(tokenizer: Tokenizer) -> None:
    grammar = MessageGrammar(THINK, False, calls("hermes", required=False), None)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for text, allowed in (
        ("<think> a </thi\n</think>\n\nHi", True),
        (f"<think> a </think>\n\n{call}", True),
        (f"<think> a </think>{call}\n{call}", True),
        (f"Hi <think> {call}", True),
        (" <think>", False),
        ("<think> a", False),
    ):
        assert allows(grammar, tokenizer, text) is allowed, text


@MODELS
@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", 1),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", 2),
        ("llama3", LLAMA_CALL, 1),
        ("llama3", f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", 2),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", 2),
        ("mistral", f"[TOOL_CALLS][{CALL}]", 1),
        ("mistral", "[TOOL_CALLS]f{}", 1),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}", 2),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}", 1),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", 1),
        ("qwen3_coder", "<tool_call><function=f>\n</function></tool_call>", 1),
        ("qwen3_coder", f"{QWEN_CALL}\n{QWEN_CALL}", 2),
        ("smollm2", f"<tool_call>[\n{CALL},\n{CALL}\n]</tool_call>", 2),
        ("smollm2", f"<tool_call>[{CALL}]</tool_call>", 1),
    ],
)
def test_spelling_of_the_models_is_allowed(
    tokenizer: Tokenizer, name: str, text: str, count: int
) -> None:
    grammar = MessageGrammar(None, False, calls(name, required=True), None)
    assert allows(grammar, tokenizer, text)
    assert len(parse(parser(grammar, name), [text]).calls) == count
    one = MessageGrammar(None, False, calls(name, required=True, parallel=False), None)
    assert allows(one, tokenizer, text) is (count == 1)
    assert not allows(grammar, tokenizer, f"Hi {text}")
    assert not allows(grammar, tokenizer, "")


@MODELS
@pytest.mark.parametrize("is_reasoning", [False, True])
@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        (GrammarKind.JSON_SCHEMA, '{"enum":["é"]}', '"é"'),
        (GrammarKind.REGEX, r"a/[/\\]\/{2}\\", "a/\\//\\"),
        (GrammarKind.REGEX, "(a|b)\n|c", "b\n"),
        (GrammarKind.CHOICE, '["a\\n\\"/", "b"]', 'a\n"/'),
        (GrammarKind.GRAMMAR, 'start: "<" x ">"\nx: /[a-z}]+/ | "{"', "<a}>"),
        (GrammarKind.GRAMMAR, 'root ::= "<" ("x" | "{y}") ">"', "<{y}>"),
    ],
)
def test_each_kind_of_answer_follows_the_reasoning(
    tokenizer: Tokenizer, is_reasoning: bool, kind: GrammarKind, source: str, text: str
) -> None:
    grammar = MessageGrammar(THINK, is_reasoning, None, GrammarSpec(kind, source))
    thought = "" if is_reasoning else "<think>"
    assert allows(grammar, tokenizer, f"{thought}Well.\n</think>\n\n{text}")
    assert not allows(grammar, tokenizer, f"{thought}Well.\n</think>\n\n{text}?")
    assert not allows(grammar, tokenizer, f"{thought}Well.\n{text}")
    assert allows(grammar, tokenizer, text) is not is_reasoning
    message = parse(parser(grammar, "hermes"), list(f"{thought}Well.\n</think>\n\n{text}"))
    assert (message.content, message.reasoning) == (text, "Well.\n")
