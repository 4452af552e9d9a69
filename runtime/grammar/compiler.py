"""Compiles constraints to grammars over the tokens of a model."""

import json
import re
import threading
import time
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from runtime.grammar.matcher import Matcher
from runtime.grammar.schema import prepared_schema
from runtime.grammar.spec import (
    ANSWER,
    LARK,
    GrammarBounds,
    GrammarFault,
    GrammarKind,
    GrammarSpec,
    InvalidGrammar,
    parsed_json,
)
from runtime.grammar.vocabulary import GrammarVocabulary

_LIMITS = LLParserLimits(verbose_errors=False)
"""Limits of llguidance on the work of a compilation and of each mask; its defaults."""
_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
_MAX_ERROR_CHARS = 300
_INITIAL_STATES = 8
_LITTLE_S = 0.1
"""A grammar that takes longer to compile has one initial state, seconds."""
_EMPTY = ("NoExtension", "NoExtensionBias")
"""Errors of llguidance for grammars without any text."""
_UNSUPPORTED = re.compile("unimplemented|not supported|unknown format", re.IGNORECASE)
_TOO_COMPLEX = re.compile("too (large|many)|exceeded|fuel")
"""Parts of errors of llguidance for what it does not implement, and for its limits on work."""


class Grammar:
    """A compiled constraint. Threads may share it.

    With llguidance 1.9, several threads compute the masks of states that descend from one initial
    state no faster than one thread. Sequences therefore start from `_INITIAL_STATES` states in
    turn. All but the first are compiled when they are needed, and only if that takes little time.

    Args:
        source: the constraint in llguidance's format.

    Attributes:
        vocabulary: the tokens for which it was compiled.

    Raises:
        InvalidGrammar: it cannot be compiled; the message says why.
    """

    def __init__(self, source: str, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._source = source
        self._lock = threading.Lock()
        self._starts = 0
        begin = time.monotonic()
        self._initial = [self._compile()]
        first = self._initial[0].deep_copy()
        first.compute_bitmask()
        _check(first)
        self._most = _INITIAL_STATES if time.monotonic() - begin < _LITTLE_S else 1

    def start(self, tokens: Sequence[int] = ()) -> Matcher:
        """Return the state after these output tokens.

        It takes about 5 µs for each token, and in some calls the time of a compilation.

        Raises:
            InvalidGrammar: the grammar does not allow the tokens.
        """
        matcher = Matcher(self._next().deep_copy(), self.vocabulary)
        matcher.advance(tokens)
        if matcher.error:
            raise InvalidGrammar(f"it does not allow the output so far: {matcher.error}")
        return matcher

    def _next(self) -> LLMatcher:
        """Return one of the initial states."""
        with self._lock:
            number = self._starts % self._most
            self._starts += 1
            if number == len(self._initial):
                self._initial.append(self._compile())
            return self._initial[number]

    def _compile(self) -> LLMatcher:
        found = LLMatcher(self.vocabulary.tokens, self._source, log_level=0, limits=_LIMITS)
        _check(found)
        return found


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
    if not spec.text:
        raise InvalidGrammar("it is empty")
    return Grammar(_source(spec), vocabulary)


def _source(spec: GrammarSpec) -> str:
    """Return a constraint in llguidance's format."""
    if spec.frame:
        return LLMatcher.grammar_from_lark(f"{LARK}\n{spec.frame}\n{ANSWER}: {_rule(spec)}\n")
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(_schema(spec.text))
            except ValueError as error:  # what Python accepts, such as NaN and lone surrogates
                raise InvalidGrammar(str(error)[:_MAX_ERROR_CHARS]) from None
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark(f"start: {_alternatives(spec.text)}")
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.text)
        case GrammarKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark(spec.text))


def _rule(spec: GrammarSpec) -> str:
    """Return a constraint as the body of a rule in Lark syntax."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"%json {_schema(spec.text)}"
        case GrammarKind.CHOICE:
            return _alternatives(spec.text)
        case GrammarKind.REGEX:
            return f"/{_ESCAPED_OR_SLASH.sub(_escaped, spec.text)}/"
        case GrammarKind.GRAMMAR:
            return f"%lark {{\n{_lark(spec.text)}\n}}"


def _schema(text: str) -> str:
    schema = parsed_json(text)
    if not isinstance(schema, dict):
        raise InvalidGrammar("a JSON schema must be an object")
    return json.dumps(prepared_schema(schema))


def _lark(text: str) -> str:
    """Return a grammar, which may be GBNF, in Lark syntax."""
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - it raises several types
        raise InvalidGrammar(str(error)[:_MAX_ERROR_CHARS]) from None


def _escaped(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


def _alternatives(text: str) -> str:
    """Return the body of a rule in Lark syntax for one of some strings."""
    choices = parsed_json(text)
    if not isinstance(choices, list) or not choices:
        raise InvalidGrammar("it must be a list of at least one string")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidGrammar("each choice must be a string that is not empty")
    return " | ".join(json.dumps(choice) for choice in choices)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = matcher.get_error().removesuffix("\n<non-verbose/>").strip()
        if reason in _EMPTY:
            reason = "no text matches it"
        raise InvalidGrammar(" ".join(reason.split())[:_MAX_ERROR_CHARS], _fault(reason))


def _fault(reason: str) -> GrammarFault:
    """Return the kind of an error of llguidance, which has a text only."""
    if _UNSUPPORTED.search(reason):
        return GrammarFault.UNSUPPORTED
    return GrammarFault.TOO_COMPLEX if _TOO_COMPLEX.search(reason) else GrammarFault.INVALID
