"""Constraints on output as clients write them, and bounds on their size; plain values."""

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

LARK = "%llguidance {}"
"""First line of a grammar that is in Lark syntax and not in GBNF."""
ANSWER = "answer"
"""Rule of the constraint in `GrammarSpec.frame`."""


class GrammarFault(Enum):
    """Reason for which a constraint is refused.

    Attributes:
        TOO_LARGE, TOO_DEEP: it exceeds a bound of `GrammarBounds`.
        TIMEOUT: its compilation took too long.
        TOO_COMPLEX: its compilation needs too much work or memory.
        UNSUPPORTED: it uses what the compiler does not implement.
        INVALID: it is malformed, or matches no text.
    """

    TOO_LARGE = "too_large"
    TOO_DEEP = "too_deep"
    TIMEOUT = "timeout"
    TOO_COMPLEX = "too_complex"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"


class InvalidGrammar(ValueError):
    """A constraint is malformed, not supported, too large, or matches no text."""

    def __init__(self, message: str, fault: GrammarFault = GrammarFault.INVALID) -> None:
        super().__init__(message)
        self.fault = fault


class GrammarKind(Enum):
    """Language in which a constraint is written.

    Attributes:
        JSON_SCHEMA: a JSON schema; the output is a JSON text that validates against it.
        REGEX: a regular expression in the syntax of Rust's ``regex`` crate, for the whole output.
        CHOICE: a JSON list of strings, of which the output is one.
        GRAMMAR: a context-free grammar, in llguidance's Lark syntax or in GBNF.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True)
class GrammarSpec:
    """A constraint on the output of a request.

    Attributes:
        text: the constraint in the language of ``kind``.
        frame: rules in llguidance's Lark syntax for an output of which a part follows the
            constraint. They refer to that part as `ANSWER`; empty for the constraint alone.
    """

    kind: GrammarKind
    text: str
    frame: str = ""

    @classmethod
    def json_object(cls) -> "GrammarSpec":
        """Return the constraint to any JSON object."""
        return cls(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


MAX_BYTES, MAX_DEPTH = 1 << 16, 64
"""Largest bounds, which workers have. Settings of gateways may be smaller."""


@dataclass(frozen=True)
class GrammarBounds:
    """Bounds on constraints.

    Attributes:
        max_bytes: maximum bytes of the text in UTF-8.
        max_depth: maximum nesting of a JSON schema, or of the brackets of another text.
    """

    max_bytes: int = MAX_BYTES
    max_depth: int = MAX_DEPTH

    def check(self, spec: GrammarSpec) -> None:
        """Raise `InvalidGrammar` if a constraint exceeds a bound, or is no JSON but must be."""
        try:
            size = len((spec.text + spec.frame).encode())
        except UnicodeEncodeError:
            raise InvalidGrammar("it is not valid Unicode") from None
        if size > self.max_bytes:
            raise InvalidGrammar(
                f"it has {size} bytes, the limit is {self.max_bytes}", GrammarFault.TOO_LARGE
            )
        if spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE):
            depth = _depth(parsed_json(spec.text))
        else:
            depth = _bracket_depth(spec.text)
        depth = max(depth, _bracket_depth(spec.frame))
        if depth > self.max_depth:
            raise InvalidGrammar(
                f"it is nested {depth} levels deep, the limit is {self.max_depth}",
                GrammarFault.TOO_DEEP,
            )


def parsed_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        InvalidGrammar: it is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidGrammar("it is nested too deeply", GrammarFault.TOO_DEEP) from None
    except ValueError as error:
        raise InvalidGrammar(f"it is not valid JSON: {error}") from None


def _depth(value: Any) -> int:
    """Return the number of nested arrays and objects."""
    depth, level = 0, [value]
    while level := [child for child in level if isinstance(child, dict | list)]:
        depth += 1
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return depth


def _bracket_depth(text: str) -> int:
    """Return the maximum number of brackets that are open at once; escapes and strings count."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest
