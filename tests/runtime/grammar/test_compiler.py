"""Compilation of constraints: what is accepted, refused and matched."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import pytest

from runtime.grammar.compiler import Grammar, compile_grammar
from runtime.grammar.masks import MaskWriter
from runtime.grammar.spec import (
    ANSWER,
    GrammarBounds,
    GrammarFault,
    GrammarKind,
    GrammarSpec,
    InvalidGrammar,
)
from runtime.grammar.vocabulary import GrammarVocabulary
from tests.runtime.grammar.schemas import hostile_schemas, random_schema
from tests.runtime.grammar.validation import faults
from tests.runtime.grammar.words import (
    END,
    PAD,
    SIZE,
    allowed,
    decode,
    encode,
    grammar,
    matches,
    tokenizer,
    vocabulary,
)

KIND = GrammarKind


def answer(found: Grammar, random: Random, limit: int) -> list[int]:
    """Generate random allowed tokens. Brackets and quotes are preferred, so that answers end."""
    matcher, tokens = found.start(), list[int]()
    closing = encode('"', SIZE) + encode("}", SIZE) + encode("]", SIZE)
    while len(tokens) < limit:
        among = allowed(matcher)
        assert among, matcher.error
        ends = [token for token in (END, *closing) if token in among]
        token = random.choice(ends if ends and random.random() < 0.5 else among)
        tokens.append(token)
        if token == END:
            break
        matcher.advance([token])
    assert not matcher.error
    return tokens


def compile_framed(kind: GrammarKind, source: str) -> Grammar:
    """Compile a constraint for a text between angle brackets."""
    spec = GrammarSpec(kind, source, f'start: "<" {ANSWER} ">"')
    return compile_grammar(spec, vocabulary(SIZE), GrammarBounds())


@pytest.mark.parametrize(
    ("kind", "source", "accepted", "refused"),
    [
        (KIND.REGEX, "[0-9]{2,4}", ["12", "1234"], ["1", "12345", "a"]),
        (KIND.REGEX, "(ja|nein|да)", ["ja", "да"], ["jaja"]),
        (KIND.REGEX, r"a/[/\\]\/(b\n)?", ["a///", "a/\\/b\n"], ["a//", "a/\\/b"]),
        (KIND.CHOICE, '["ä b", "\\"q\\"", "😀"]', ["ä b", '"q"', "😀"], ["ä", "q"]),
        (KIND.GRAMMAR, 'start: "a" start "b" | "x"', ["x", "aaxbb"], ["aaxb", "ab"]),
        (KIND.GRAMMAR, 'root ::= "a" root "b" | "x"', ["x", "aaxbb"], ["aaxb"]),
        (KIND.JSON_SCHEMA, '{"type":"object"}', ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{} {}"]),
        (KIND.JSON_SCHEMA, '{"type":"integer"}', ["1", "-20"], ["1.5", "01"]),
        (KIND.JSON_SCHEMA, '{"enum":["ü", 3]}', ['"ü"', "3"], ["ü", "4"]),
    ],
)
def test_texts_of_a_grammar_are_allowed_and_no_others(
    kind: GrammarKind, source: str, accepted: Sequence[str], refused: Sequence[str]
) -> None:
    found = grammar(kind, source, SIZE)
    assert [text for text in accepted if not matches(found, text)] == []
    assert [text for text in refused if matches(found, text)] == []
    framed = compile_framed(kind, source)
    assert [text for text in accepted if not matches(framed, f"<{text}>")] == []
    assert [text for text in (*refused, *accepted) if matches(framed, text)] == []
    assert [text for text in refused if matches(framed, f"<{text}>")] == []


def test_characters_that_several_tokens_form_are_allowed() -> None:
    text = '{"a": "漢字 😀 é"}'
    assert len(encode(text, 258)) == len(text.encode()), "a token for each byte"
    matcher = grammar(KIND.JSON_SCHEMA, '{"type":"object"}', 258).start()
    for token in encode(text, 258):
        assert token in allowed(matcher)
        matcher.advance([token])
    assert END in allowed(matcher)


def test_end_is_allowed_only_where_the_text_may_end() -> None:
    matcher = grammar(KIND.JSON_SCHEMA, '{"type":"object"}', SIZE).start()
    tokens = encode('{"a": "<en"}', SIZE)
    for token in tokens:
        assert END not in allowed(matcher)
        assert PAD not in allowed(matcher)
        matcher.advance([token])
    assert allowed(matcher) == [END]


def test_padding_after_the_tokenizer_is_never_allowed() -> None:
    padded = GrammarVocabulary(tokenizer(SIZE).to_str(), SIZE + 77, [END])
    found = compile_grammar(GrammarSpec(KIND.REGEX, "(?s:.*)"), padded, GrammarBounds())
    assert max(allowed(found.start())) < SIZE


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (KIND.JSON_SCHEMA, "{", "not valid JSON"),
        (KIND.JSON_SCHEMA, "3", "must be an object"),
        (KIND.JSON_SCHEMA, '{"allOf":[false]}', "schema is false"),
        (KIND.JSON_SCHEMA, '{"minimum":NaN}', ""),
        (KIND.JSON_SCHEMA, '{"maximum":1e999}', ""),
        (KIND.JSON_SCHEMA, '{"const":"\\ud800"}', ""),
        (KIND.JSON_SCHEMA, '{"enum":[]}', "anyOf is empty"),
        (KIND.JSON_SCHEMA, '{"$ref":"#"}', "no text matches it"),
        (KIND.JSON_SCHEMA, '{"$ref":"https://localhost/x.json"}', "localhost"),
        (KIND.JSON_SCHEMA, '{"not":{"type":"string"}}', 'Unimplemented keys: ["not"]'),
        (KIND.JSON_SCHEMA, '{"type":"string","pattern":"^(?=a)b"}', "look-around"),
        (KIND.JSON_SCHEMA, '{"type":"string","minLength":3,"maxLength":2}', "minLength"),
        (KIND.JSON_SCHEMA, '{"x-guidance":3,"type":"nothing"}', ""),
        (KIND.REGEX, "(", "unclosed group"),
        (KIND.REGEX, "a\ud800", "not valid Unicode"),
        (KIND.CHOICE, "[]", "at least one string"),
        (KIND.CHOICE, '["a", ""]', "not empty"),
        (KIND.CHOICE, '["a", 3]', "must be a string"),
        (KIND.GRAMMAR, "start: (", ""),
        (KIND.REGEX, "", "it is empty"),
        (KIND.REGEX, "a" * 70_000, "70000 bytes, the limit is 65536"),
        (KIND.JSON_SCHEMA, '{"items":' * 65 + "{}" + "}" * 65, "nested 66 levels deep"),
        (KIND.JSON_SCHEMA, "[" * 30_000, "nested too deeply"),
        (KIND.REGEX, "(" * 65 + ")" * 65, "nested 65 levels deep"),
    ],
)
def test_malformed_constraints_are_refused(kind: GrammarKind, source: str, reason: str) -> None:
    with pytest.raises(InvalidGrammar) as refusal:
        grammar(kind, source, SIZE)
    assert reason in str(refusal.value)
    assert len(str(refusal.value)) < 400
    if reason != "no text matches it":  # the text before the constraint matches
        with pytest.raises(InvalidGrammar):
            compile_framed(kind, source)


@pytest.mark.parametrize(
    ("kind", "source", "fault"),
    [
        (KIND.REGEX, "a" * 70_000, GrammarFault.TOO_LARGE),
        (KIND.REGEX, "(" * 65 + ")" * 65, GrammarFault.TOO_DEEP),
        (KIND.JSON_SCHEMA, "[" * 30_000, GrammarFault.TOO_DEEP),
        (KIND.JSON_SCHEMA, hostile_schemas()["product of anyOf"], GrammarFault.TOO_COMPLEX),
        (KIND.JSON_SCHEMA, '{"not": {}}', GrammarFault.UNSUPPORTED),
        (KIND.JSON_SCHEMA, '{"type": "string", "format": "regex"}', GrammarFault.UNSUPPORTED),
        (KIND.JSON_SCHEMA, '{"oneOf": [{}, {}]}', GrammarFault.UNSUPPORTED),
        (KIND.REGEX, "(?=a)", GrammarFault.UNSUPPORTED),
        (KIND.GRAMMAR, '%declare A\nstart: "a"', GrammarFault.UNSUPPORTED),
        (KIND.JSON_SCHEMA, "{", GrammarFault.INVALID),
        (KIND.JSON_SCHEMA, '{"enum": []}', GrammarFault.INVALID),
        (KIND.REGEX, "(", GrammarFault.INVALID),
        (KIND.GRAMMAR, "start: start", GrammarFault.INVALID),
        (KIND.CHOICE, "[]", GrammarFault.INVALID),
    ],
)
def test_refused_constraints_have_a_kind_of_fault(
    kind: GrammarKind, source: str, fault: GrammarFault
) -> None:
    with pytest.raises(InvalidGrammar) as refusal:
        grammar(kind, source, SIZE)
    assert refusal.value.fault is fault


@pytest.mark.parametrize("name", hostile_schemas())
def test_hostile_schemas_take_bounded_time(name: str) -> None:
    """Each is refused, or compiled and matched within llguidance's limits on work."""
    begin = time.process_time()
    try:
        found = grammar(KIND.JSON_SCHEMA, hostile_schemas()[name], SIZE)
    except InvalidGrammar:
        pass
    else:
        matcher, random = found.start(), Random(1)
        for _ in range(30):
            among = allowed(matcher)
            if matcher.error or among == [END]:
                break
            matcher.advance([random.choice(among)])
    assert time.process_time() - begin < 8


def test_random_schemas_are_accepted_and_answers_validate() -> None:
    random = Random(41)
    schemas = [random_schema(random) for _ in range(150)]
    refused, finished = list[str](), 0
    for schema in schemas:
        try:
            found = grammar(KIND.JSON_SCHEMA, json.dumps(schema), SIZE)
        except InvalidGrammar as error:
            refused.append(str(error))
            continue
        tokens = answer(found, random, 300)
        if tokens[-1] == END:
            finished += 1
            assert not faults(json.loads(decode(tokens, SIZE)), schema)
    assert len(refused) <= 0.05 * len(schemas), refused
    assert finished > 0.8 * len(schemas)


def test_union_with_a_discriminator_is_accepted() -> None:
    def branch(kind: str) -> dict[str, object]:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind}, "v": {"type": "integer"}},
            "required": ["kind", "v"],
            "additionalProperties": False,
        }

    schema = {
        "$defs": {"A": branch("a"), "B": branch("b")},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind"},
    }
    found = grammar(KIND.JSON_SCHEMA, json.dumps(schema), SIZE)
    assert matches(found, '{"kind": "b", "v": 1}')
    assert not matches(found, '{"kind": "c", "v": 1}')


def test_formats_that_json_schema_does_not_define_are_ignored() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"type": "integer", "format": "int32"}, "p": {"enum": ["format"]}},
        "required": ["format"],
        "additionalProperties": False,
    }
    assert matches(grammar(KIND.JSON_SCHEMA, json.dumps(schema), SIZE), '{"format": 12}')
    exact = {"const": {"format": "int32"}}
    assert matches(grammar(KIND.JSON_SCHEMA, json.dumps(exact), SIZE), '{"format":"int32"}')
    with pytest.raises(InvalidGrammar, match="format"):
        grammar(KIND.JSON_SCHEMA, '{"type":"string","format":"iri"}', SIZE)


def test_escaped_name_of_a_property_is_not_an_additional_one() -> None:
    schema = {
        "type": "object",
        "properties": {"größe": {"type": "string"}, "ab": {"type": "string"}},
        "additionalProperties": {"type": "integer"},
    }
    found = grammar(KIND.JSON_SCHEMA, json.dumps(schema), SIZE)
    assert matches(found, '{"größe": "\\" \\n 😀", "other": 3}')
    framed = compile_framed(KIND.JSON_SCHEMA, json.dumps(schema))
    assert matches(framed, '<{"größe": "", "other": 3}>')
    for name in ("größe", "gr\\u00f6\\u00dfe", "a\\u0062"):
        assert not matches(found, f'{{"{name}": 3}}')
        assert not matches(framed, f'<{{"{name}": 3}}>')


def test_frame_counts_for_the_bounds() -> None:
    spec = GrammarSpec(KIND.CHOICE, '["a"]', 'start: "b" | answer')
    with pytest.raises(InvalidGrammar, match="24 bytes, the limit is 23"):
        GrammarBounds(23, 4).check(spec)
    with pytest.raises(InvalidGrammar, match="nested 3 levels"):
        GrammarBounds(99, 2).check(replace(spec, frame='start: ((("b"))) | answer'))


def test_union_with_branches_that_overlap_is_refused() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(InvalidGrammar, match="oneOf"):
        grammar(KIND.JSON_SCHEMA, json.dumps(schema), SIZE)


def test_state_depends_on_the_tokens_alone() -> None:
    found = grammar(KIND.JSON_SCHEMA, json.dumps(random_schema(Random(2))), SIZE)
    tokens = answer(found, Random(3), 200)
    at_once = found.start(tokens[:-1])
    for count in range(len(tokens)):
        replayed = found.start(tokens[:count])
        stepwise = found.start()
        for token in tokens[:count]:
            allowed(stepwise)
            stepwise.advance([token])
        assert allowed(replayed) == allowed(stepwise) == allowed(stepwise.copy())
    assert allowed(at_once) == allowed(replayed)


def test_tokens_that_the_grammar_does_not_allow_are_refused() -> None:
    found = grammar(KIND.CHOICE, '["yes", "no"]', SIZE)
    with pytest.raises(InvalidGrammar, match="does not allow the output so far"):
        found.start(encode("maybe", SIZE))


def test_states_of_many_threads_allow_the_same_tokens() -> None:
    found = grammar(KIND.JSON_SCHEMA, '{"type": "integer"}', SIZE)
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(lambda _: found.start(encode("12", SIZE)), range(40)))
    assert {tuple(allowed(state)) for state in states} == {tuple(allowed(states[0]))}
    assert END in allowed(states[0])


def test_states_are_advanced_in_parallel_as_one_by_one() -> None:
    found = grammar(KIND.CHOICE, '["yes", "no"]', SIZE)
    outputs = [encode(text, SIZE) for text in ("y", "no", "", "x", "n")]
    alone, together = ([found.start() for _ in outputs] for _ in range(2))
    for state, output in zip(alone, outputs, strict=True):
        state.advance(output)
    MaskWriter(2).advance(together, outputs)
    assert [bool(state.error) for state in together] == [False, False, False, True, False]
    for one, other in zip(alone, together, strict=True):
        assert (one.consumed, one.error) == (other.consumed, other.error)
        assert one.error or allowed(one) == allowed(other)


def test_error_of_one_state_does_not_change_others() -> None:
    found = grammar(KIND.CHOICE, '["yes", "no"]', SIZE)
    bad, good = found.start(), found.start()
    bad.advance(encode("x", SIZE))
    assert bad.error
    assert not good.error
    before = allowed(good)
    assert before == allowed(found.start())
