"""Compiles constraints to grammars over the tokens of a model."""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from runtime.grammar.matcher import Matcher
from runtime.grammar.schema import one_of_is_any_of, without_unknown_formats
from runtime.grammar.spec import (
    GrammarBounds,
    GrammarKind,
    GrammarSpec,
    InvalidGrammar,
    parsed_json,
)
from runtime.grammar.vocabulary import GrammarVocabulary

_LIMITS = LLParserLimits(verbose_errors=False)
"""Limits of llguidance on the work of a compilation and of each mask; its defaults."""
_WHITESPACE = r"[ \n\r\t]{0,32}"
"""Whitespace between the tokens of a JSON text. A bound is needed, because models may otherwise
generate whitespace without end."""
_ESCAPES = '"\\bfnrt'
"""Characters after a backslash in JSON strings. Without ``u`` and ``/``, each text has one
spelling, so that an additional property cannot have the name of a declared one."""
_MAX_ERROR_CHARS = 300
_EMPTY = ("NoExtension", "NoExtensionBias")
"""Errors of llguidance for grammars without any text."""


class Grammar:
    """A compiled constraint. Threads may share it.

    Attributes:
        vocabulary: the tokens for which it was compiled.
    """

    def __init__(self, initial: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._initial = initial
        self.vocabulary = vocabulary

    def start(self, tokens: Sequence[int] = ()) -> Matcher:
        """Return the state after these output tokens.

        It takes about 5 µs for each token.

        Raises:
            InvalidGrammar: the grammar does not allow the tokens.
        """
        matcher = Matcher(self._initial.deep_copy(), self.vocabulary)
        matcher.advance(tokens)
        if matcher.error:
            raise InvalidGrammar(f"it does not allow the output so far: {matcher.error}")
        return matcher


def compile_grammar(
    spec: GrammarSpec, vocabulary: GrammarVocabulary, bounds: GrammarBounds
) -> Grammar:
    """Compile a constraint, with the mask of the first token.

    It releases the interpreter's lock most of the time. A typical JSON schema takes 1 ms. A hostile
    one, such as one with a large ``multipleOf``, can take minutes: llguidance's limits do not bound
    the time. Compile what an untrusted client sent in a process that can be ended.

    Raises:
        InvalidGrammar: it cannot be compiled; the message says why.
    """
    bounds.check(spec)
    initial = LLMatcher(vocabulary.tokens, _source(spec), log_level=0, limits=_LIMITS)
    _check(initial)
    grammar = Grammar(initial, vocabulary)
    first = initial.deep_copy()
    first.compute_bitmask()
    _check(first)
    return grammar


def _source(spec: GrammarSpec) -> str:
    """Return a constraint in llguidance's format."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _schema_source(spec.text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark(_alternatives(parsed_json(spec.text)))
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.text)
        case GrammarKind.GRAMMAR:
            try:
                return grammar_from("grammar", spec.text)
            except (ValueError, RecursionError) as error:
                raise InvalidGrammar(str(error)[:_MAX_ERROR_CHARS]) from None


def _schema_source(text: str) -> str:
    schema = parsed_json(text)
    if not isinstance(schema, dict):
        raise InvalidGrammar("a JSON schema must be an object")
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(without_unknown_formats(schema)),
            overrides={
                "whitespace_pattern": _WHITESPACE,
                "json_allowed_escapes": _ESCAPES,
                "lenient": False,
                "coerce_one_of": one_of_is_any_of(schema),
            },
        )
    except ValueError as error:  # JSON that Python accepts, such as NaN and lone surrogates
        raise InvalidGrammar(str(error)[:_MAX_ERROR_CHARS]) from None


def _alternatives(choices: Any) -> str:
    """Return a Lark grammar of one of the given strings."""
    if not isinstance(choices, list) or not choices:
        raise InvalidGrammar("it must be a list of at least one string")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidGrammar("each choice must be a string that is not empty")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = matcher.get_error().removesuffix("\n<non-verbose/>").strip()
        if reason in _EMPTY:
            reason = "no text matches it"
        raise InvalidGrammar(" ".join(reason.split())[:_MAX_ERROR_CHARS])
