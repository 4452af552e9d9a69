"""Grammar of parameters that models write as text, each between tags.

A string is any text without the tags of the format, or one of some texts. All other values are
JSON. Parameters have the order of the schema, and those that are not required may be missing.
"""

import json
from collections.abc import Mapping
from typing import Any

from runtime.grammar.schema import prepared_schema, without_unknown_formats
from runtime.grammar.spec import GrammarFault, InvalidGrammar
from services.gateway.output.lark import ANY as ANY_TEXT
from services.gateway.output.lark import other_than, quoted, without
from services.gateway.output.parameter_values import ANY, resolved, types_of

_TAGS = ("</parameter>", "<parameter=", "</function>")
_END = "\n</parameter>"
_EXTRA_NAME = "/[^<>\\n ][^<>\\n]{0,63}/"
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment")
)
_OF_OBJECTS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
)
_OF_STRINGS = frozenset(("type", "minLength", "maxLength", "pattern", "format"))
_TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": f"{_BYTE}(\\.{_BYTE}){{3}}",
    "email": "[a-zA-Z0-9_+-]+(\\.[a-zA-Z0-9_+-]+)*@[a-zA-Z0-9-]+(\\.[a-zA-Z0-9-]+)+",
    "uri": "[a-zA-Z][a-zA-Z0-9+.-]*:[a-zA-Z0-9._~:\\/?#@!$&'()*+,;=-]+",
}
"""Regular expressions of formats; each text that they match has the format."""
_BRANCHES = ("anyOf", "oneOf")
_ROOT = "root"
"""Name of the whole schema in the definitions of one of its parts."""


def parameter_rules(rule: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return the rule of the parameters of a call in Lark syntax, and those it uses.

    Raises:
        InvalidGrammar: the format cannot follow the schema.
    """
    return _Parameters(rule, parameters).rules()


class _Parameters:
    """The rules of the parameters of one function.

    Args:
        rule: the name of the first rule, which begins those of the others.
        root: schema of the arguments.
    """

    def __init__(self, rule: str, root: Mapping[str, Any]) -> None:
        self._rule = rule
        self._root = root
        self._schema = resolved(root, root)
        self._rules: list[str] = []

    def rules(self) -> list[str]:
        schema = self._schema
        _check_keywords(schema, _OF_OBJECTS, "an object of parameters")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _unsupported("properties must be an object, and required a list")
        parts = [
            self._parameter(at, name, value) + ("" if name in required else "?")
            for at, (name, value) in enumerate(properties.items())
            if value is not False
        ]
        missing = [name for name in required if name not in properties]
        if missing:
            raise _unsupported(f"required parameters without a schema: {missing[:3]}")
        if self._has_others(schema):
            parts.append(self._others(schema.get("additionalProperties", True), [*properties]))
        return [f"{self._rule}: {' '.join(parts) or quoted('')}", *self._rules]

    def _has_others(self, schema: Mapping[str, Any]) -> bool:
        """Return whether parameters may be given that the schema does not declare."""
        if "additionalProperties" in schema:
            return schema["additionalProperties"] is not False
        return "properties" not in schema

    def _parameter(self, at: int, name: str, schema: Any) -> str:
        """Add the rule of a parameter, and return its name."""
        if not name.strip() or name != name.strip() or any(char in name for char in "<>\n"):
            raise _unsupported(f"a parameter with the name {name[:64]!r}")
        rule = f"{self._rule}_{at}"
        value = self._value(rule, schema)
        self._rules.append(f'{rule}: {quoted(f"<parameter={name}>")} "\\n" {value} "\\n"')
        return rule

    def _others(self, schema: Any, declared: list[str]) -> str:
        """Add the rule of parameters that are not declared, and return an expression for them."""
        rule = f"{self._rule}_others"
        value = self._value(rule, schema)
        name = rule.upper() + "_NAME"
        terminal = " & ".join([_EXTRA_NAME, *map(other_than, declared)])
        self._rules += [
            f'{rule}: "<parameter=" {name} ">" "\\n" {value} "\\n"',
            f"{name}: {terminal}",
        ]
        return f"{rule}*"

    def _value(self, rule: str, schema: Any) -> str:
        """Add the rules of a value, and return an expression for it and the end tag."""
        types = types_of(schema, self._root)
        texts = self._texts(schema) if types == ANY or "string" in types else []
        others = types - {"string"}
        ends: list[str] = []
        literals = [text for text in texts if not text.startswith("/")]
        for at, text in enumerate(text for text in texts if text.startswith("/")):
            terminal = f"{rule.upper()}_{at}"
            marks = " & ".join([text, *map(without, _TAGS)])
            self._rules.append(f"{terminal}: ({marks}) {quoted(_END)}")
            ends.append(terminal)
        if others and not (len(ends) == 1 and self._is_any_text(texts)):
            self._rules.append(f"{rule}_json: %json {self._json(schema, types)}")
            literals.append(f"{rule}_json")
        if literals:
            ends.append(f"({' | '.join(literals)}) {quoted(_END)}")
        if not ends:
            raise _unsupported("a parameter without any value")
        return f"({' | '.join(ends)})"

    def _is_any_text(self, texts: list[str]) -> bool:
        return texts == [ANY_TEXT]

    def _json(self, schema: Any, types: frozenset[str]) -> str:
        """Return a schema for the values that are not strings, with the definitions it uses."""
        found = schema
        if "string" in types:
            kinds = sorted(types - {"string"})
            found = {"allOf": [schema, {"type": kinds}]}
        if "$ref" in json.dumps(schema):
            definitions = {_ROOT: _with_root(self._root)}
            found = {**_with_root(found), "$defs": definitions}
        return json.dumps(prepared_schema(found))

    def _texts(self, schema: Any, depth: int = 0) -> list[str]:
        """Return expressions for the strings of a schema: literals, or terminals with slashes."""
        schema = resolved(schema, self._root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            strings = [value for value in values if isinstance(value, str)]
            if any(tag in value for value in strings for tag in _TAGS):
                raise _unsupported("strings with tags of the format")
            return [quoted(value) for value in strings]
        for name in _BRANCHES:
            if isinstance(branches := schema.get(name), list):
                _check_keywords(schema, frozenset((name, "type")), f"strings with {name}")
                found = [text for branch in branches for text in self._branch(branch, depth)]
                return list(dict.fromkeys(found))
        if types_of(schema, self._root) != ANY:
            _check_keywords(_string_part(schema), _OF_STRINGS, "strings")
        else:
            _check_keywords(schema, frozenset(), "parameters without a type")
        return [_terminal(schema)]

    def _branch(self, branch: Any, depth: int) -> list[str]:
        if depth > 8:
            raise _unsupported("deeply nested branches")
        types = types_of(branch, self._root)
        return self._texts(branch, depth + 1) if types == ANY or "string" in types else []


def _terminal(schema: Mapping[str, Any]) -> str:
    """Return a terminal for the strings of a schema without branches."""
    least, most, pattern = (schema.get(name) for name in ("minLength", "maxLength", "pattern"))
    terminals = []
    if isinstance(pattern, str):
        terminals.append(f"/{_searched(pattern)}/")
    if "format" in without_unknown_formats(schema):
        name = schema["format"]
        if name not in _FORMATS:
            raise _unsupported(f"the format {name}")
        terminals.append(f"/{_FORMATS[name]}/")
    if least is not None or most is not None:
        terminals.append(f"/(?s:.{{{int(least or 0)},{'' if most is None else int(most)}}})/")
    return " & ".join(terminals) or ANY_TEXT


def _searched(pattern: str) -> str:
    """Return a regular expression for texts in which a pattern is found.

    Raises:
        InvalidGrammar: it has anchors elsewhere than around all of it.
    """
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[start : len(pattern) - end]
    if (start or end) and _has_alternatives(inner):
        raise _unsupported("patterns with alternatives beside anchors")
    inner = inner.replace("\\/", "/").replace("/", "\\/")
    before, after = "" if start else "(?s:.*)", "" if end else "(?s:.*)"
    return f"{before}(?:{inner}){after}"


def _has_alternatives(pattern: str) -> bool:
    """Return whether a pattern has ``|`` outside of brackets."""
    depth, at = 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == "|" and depth == 0:
            return True
        at += 1
    return False


def _string_part(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema without the keywords that do not apply to strings."""
    if schema.get("type") == "string" or not isinstance(schema.get("type"), list):
        return schema
    applies = _OF_STRINGS | _ANNOTATIONS
    return {name: value for name, value in schema.items() if name in applies}


def _check_keywords(schema: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    unknown = sorted(schema.keys() - known - _ANNOTATIONS)
    if unknown:
        raise _unsupported(f"{unknown[0]} of {what}")


def _with_root(schema: Any) -> Any:
    """Return a schema whose references lead to the whole schema among its definitions."""
    if isinstance(schema, list):
        return [_with_root(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: f"#/$defs/{_ROOT}{value[1:]}"
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _with_root(value)
        for name, value in schema.items()
    }


def _unsupported(what: str) -> InvalidGrammar:
    message = f"{what} is not supported in calls of this model"
    return InvalidGrammar(message, GrammarFault.UNSUPPORTED)
